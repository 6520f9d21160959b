#include "providers/libfabric/library.h"

#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

namespace kvc::libfabric {
namespace {

constexpr const char* kSoName = "libfabric.so.1";
// The symbol versions whose structures our headers describe. dlsym() would return the newest, whose structures may be
// longer. Programs linked against libfabric 1.3 to 1.17 use 1.3, and every later library keeps it. The library then
// translates structures to and from its newer ones.
constexpr const char* kInfoVersion = "FABRIC_1.3";

std::string directory(std::string_view path) { return std::string(path.substr(0, path.rfind('/'))); }

// The places in which `pip install mpich` puts the library: PREFIX/lib/mpich. Our extension lies in
// PREFIX/lib/pythonX.Y/site-packages/kv_connector.
std::vector<std::string> wheel_candidates() {
  std::vector<std::string> candidates;
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&kSoName), &info) != 0 && info.dli_fname != nullptr &&
      std::string_view(info.dli_fname).find('/') != std::string_view::npos) {
    candidates.push_back(directory(info.dli_fname) + "/../../../mpich/" + kSoName);
  }
  if (const char* environment = std::getenv("VIRTUAL_ENV"); environment != nullptr) {
    candidates.push_back(std::string(environment) + "/lib/mpich/" + kSoName);
  }
  return candidates;
}

// The wheel's library looks for its efa and verbs plug-ins in the folder in which it was built, unless this variable
// names another place.
void name_plugins(const std::string& path) {
  const std::string plugins = directory(path) + "/libfabric";
  if (access(plugins.c_str(), R_OK) == 0) setenv("FI_PROVIDER_PATH", plugins.c_str(), /*overwrite=*/0);
}

void* open(const std::string& path, std::string& tried) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
  return handle;
}

template <typename Function>
bool find(void* handle, const char* name, const char* version, Function& function) {
  function = reinterpret_cast<Function>(dlvsym(handle, name, version));
  return function != nullptr;
}

Result<Library> load() {
  std::string tried;
  void* handle = nullptr;
  const char* variable = std::getenv("KV_CONNECTOR_LIBFABRIC");
  // a copy, because name_plugins() sets another variable
  const std::string chosen = variable == nullptr ? "" : variable;
  if (!chosen.empty()) {
    name_plugins(chosen);
    handle = open(chosen, tried);
    if (handle == nullptr) {
      return fabric_error(ErrorCode::kRefused, "open", "KV_CONNECTOR_LIBFABRIC names no usable library: " + tried);
    }
  } else {
    handle = open(kSoName, tried);
    for (const std::string& path : wheel_candidates()) {
      if (handle != nullptr) break;
      if (access(path.c_str(), R_OK) != 0) continue;
      name_plugins(path);
      handle = open(path, tried);
    }
  }
  if (handle == nullptr) {
    return fabric_error(ErrorCode::kRefused, "open",
                        "no libfabric found (" + tried +
                            "): install Debian's libfabric1, or `pip install mpich` (which carries one), or name it in "
                            "KV_CONNECTOR_LIBFABRIC");
  }
  Library library;
  uint32_t (*version)() = nullptr;
  const bool complete = find(handle, "fi_getinfo", kInfoVersion, library.getinfo) &&
                        find(handle, "fi_freeinfo", kInfoVersion, library.freeinfo) &&
                        find(handle, "fi_dupinfo", kInfoVersion, library.dupinfo) &&
                        find(handle, "fi_fabric", "FABRIC_1.1", library.fabric) &&
                        find(handle, "fi_strerror", "FABRIC_1.0", library.strerror) &&
                        find(handle, "fi_version", "FABRIC_1.0", version);
  Dl_info info{};
  if (version != nullptr && dladdr(reinterpret_cast<void*>(version), &info) != 0) library.path = info.dli_fname;
  if (!complete) return fabric_error(ErrorCode::kRefused, "open", library.path + " is not a known libfabric");
  library.version = version();
  if (FI_VERSION_LT(library.version, FI_VERSION(1, 9))) {
    // 1.9 is the first whose fi_info has all the fields of our headers.
    return fabric_error(ErrorCode::kRefused, "open",
                        "libfabric " + library.description() + " is too old: 1.9 is needed");
  }
  return library;
}

const Result<Library>& loaded() {
  static const Result<Library> result = load();
  return result;
}

}  // namespace

std::string Library::description() const {
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version)) + " (" + path + ")";
}

Result<const Library*> library() {
  const Result<Library>& result = loaded();
  if (!result) return result.error();
  return &result.value();
}

Error fabric_error(ErrorCode code, std::string operation, std::string message) {
  return Error{code, "libfabric", {}, std::move(operation), std::move(message)};
}

Error fabric_error(std::string operation, const char* call, ssize_t result) {
  const Result<Library>& library = loaded();
  std::string words = library ? library.value().strerror(static_cast<int>(-result)) : std::to_string(result);
  return fabric_error(ErrorCode::kSystem, std::move(operation), std::string(call) + ": " + words);
}

}  // namespace kvc::libfabric
