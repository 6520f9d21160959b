# For Linux on KVC_MACHINE (x86_64 or aarch64) with glibc 2.28 or newer, by the compiler in the ziglang wheel (KVC_ZIG).
# libc++ and the unwinder end up inside of what is linked, so that nothing is needed of a machine but glibc.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES KVC_MACHINE KVC_ZIG)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${KVC_MACHINE})
set(CMAKE_CXX_COMPILER ${KVC_ZIG} c++ -target ${KVC_MACHINE}-linux-gnu.2.28)
set(CMAKE_CXX_ARCHIVE_CREATE "\"${KVC_ZIG}\" ar qcs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "\"${KVC_ZIG}\" ar qs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
# This machine's strip knows no other machine's files: the linker leaves the symbols out.
set(CMAKE_STRIP "" CACHE STRING "" FORCE)
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,-s -Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exported.map")
# No path of the machine that compiles.
set(CMAKE_CXX_FLAGS_INIT "-ffile-prefix-map=${CMAKE_SOURCE_DIR}/= -ffile-prefix-map=${CMAKE_BINARY_DIR}/=")
# A second libc++, for code that nothing is inlined into: not worth 100 s.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF CACHE BOOL "")
# Headers and libraries of this machine are not those of the other.
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY NEVER)
