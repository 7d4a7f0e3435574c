// What the headers of this compiler take from libstdc++ 6.0.26 to 6.0.29 and glibc 2.32, for systems that
// have older ones. Built with LIGER_MANYLINUX_2_28 only; no symbol is exported.
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

// Of <sys/single_threaded.h>. False is always right: reference counts are atomic then.
extern "C" char __libc_single_threaded = 0;
