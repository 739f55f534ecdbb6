// Definitions that g++ would take from newer versions of libstdc++ and glibc, so that the library runs
// with versions as old as jaxlib allows. setup.py links the rest of float16; see also threads.h.
#include <new>
#include <sstream>

#if defined(__linux__) && defined(__GLIBCXX__)
template class std::basic_stringstream<char>;  // jaxlib's headers use a constructor of libstdc++ 9

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // of libstdc++ 11
}  // namespace std

// Whether there is only one thread (glibc 2.32): never in a process with XLA.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif
