// What g++ takes from newer versions of libstdc++ and glibc, defined here: the library then runs where
// they are as old as jaxlib allows. setup.py links what is left of float16; see threads.h too.
#include <new>
#include <sstream>

#if defined(__linux__) && defined(__GLIBCXX__)
template class std::basic_stringstream<char>;  // jaxlib's headers use a constructor of libstdc++ 9

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // of libstdc++ 11
}  // namespace std

// Whether there is one thread, of glibc 2.32: never, in a process of XLA.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif
