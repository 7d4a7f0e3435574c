// SPDX-License-Identifier: BSD-3-Clause

// Symbols of libstdc++ 6.0.26 to 6.0.29 and glibc 2.32 that the headers of this compiler use, for systems
// with older versions. Built with LIGER_MANYLINUX_2_28 only; no symbol is exported.
#include <new>
#include <sstream>

// Their default constructors, and str(), are in the library since GCC 9 and 11.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;

namespace std {
void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

// Declared in <sys/single_threaded.h>. False is always correct: it makes reference counts atomic.
extern "C" char __libc_single_threaded = 0;
