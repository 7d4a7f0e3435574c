// A process can have the ops of torch.ops.liger once. A second copy of this library would register them
// again, which ends in a segmentation fault inside torch: it ends here, with the names of both.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr const char* kFileName = "libliger_ops.so";

struct Search {
  const char* own;
  const char* other;
};

int compare(dl_phdr_info* info, size_t, void* data) {
  Search& search = *static_cast<Search*>(data);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* file = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strcmp(file, kFileName) != 0 || std::strcmp(info->dlpi_name, search.own) == 0) return 0;
  search.other = info->dlpi_name;
  return 1;
}

// Before the ops are registered, which static objects do, too.
[[gnu::constructor(101)]] void refuse_a_second_copy() {
  Dl_info here{};
  if (dladdr(reinterpret_cast<void*>(&refuse_a_second_copy), &here) == 0) return;
  Search search{here.dli_fname, nullptr};
  if (dl_iterate_phdr(compare, &search) == 0) return;
  // No exception leaves the constructors of a library.
  std::fprintf(
      stderr,
      "liger: %s is a second copy of %s, whose ops this process has from %s already. Load one of them.\n",
      here.dli_fname, kFileName, search.other);
  std::abort();
}

}  // namespace
