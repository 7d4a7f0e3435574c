// SPDX-License-Identifier: BSD-3-Clause

// A process can register the ops of torch.ops.liger once. A second copy of this library would register them
// again and crash inside torch with a segmentation fault. This check aborts before that, with the paths of
// both copies.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr const char* kFileName = "libliger_ops.so";

struct LoadedCopies {
  const char* own;
  const char* other;
};

int find_other_copy(dl_phdr_info* info, size_t, void* data) {
  LoadedCopies& copies = *static_cast<LoadedCopies*>(data);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* file = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strcmp(file, kFileName) != 0 || std::strcmp(info->dlpi_name, copies.own) == 0) return 0;
  copies.other = info->dlpi_name;
  return 1;
}

// The priority makes it run before the static initialisers, which register the ops.
[[gnu::constructor(101)]] void refuse_a_second_copy() {
  Dl_info here{};
  if (dladdr(reinterpret_cast<void*>(&refuse_a_second_copy), &here) == 0) return;
  LoadedCopies copies{here.dli_fname, nullptr};
  if (dl_iterate_phdr(find_other_copy, &copies) == 0) return;
  // An exception cannot leave the constructor of a library.
  std::fprintf(
      stderr,
      "liger: %s is a second copy of %s, whose ops this process has from %s already. Load one of them.\n",
      here.dli_fname, kFileName, copies.other);
  std::abort();
}

}  // namespace
