# cmake -DIMAGE=kernels.fatbin -DOUT=kernel_image.cc -DHEADER=cuda/driver.h -DFUNCTION=kvc::cuda::kernel_image -P embed.cmake
# Writes the compiled kernels as a C++ array, and the function `FUNCTION` that returns it. `HEADER` declares the
# function.
file(READ ${IMAGE} bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE ${OUT} "// Generated.
#include \"${HEADER}\"
namespace {
alignas(64) constexpr unsigned char kImage[] = {${bytes}};
}
std::span<const unsigned char> ${FUNCTION}() noexcept { return kImage; }
")
