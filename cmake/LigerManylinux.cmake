# SPDX-License-Identifier: BSD-3-Clause

# Wheels for manylinux_2_28, also from a later system.
#
# A library needs the versions of glibc's symbols that were current where it was linked. With LIGER_MANYLINUX_2_28 the
# libraries are linked against stubs of libdl, libpthread and librt that have the symbols which glibc 2.34 moved into
# libc.so.6, in their older version; later systems still have that one. What libstdc++ has since GCC 9 is linked in
# (csrc/host/manylinux_2_28.cpp).

option(LIGER_MANYLINUX_2_28 "Link for glibc 2.28 and the libstdc++ of GCC 8" OFF)
add_library(liger_manylinux INTERFACE)
add_library(liger::manylinux ALIAS liger_manylinux)
if(NOT LIGER_MANYLINUX_2_28)
  return()
endif()

# The version that these symbols had until glibc 2.33, and that of dlmopen, which is younger.
set(version_x86_64 GLIBC_2.2.5)
set(version_dlmopen_x86_64 GLIBC_2.3.4)
set(version_aarch64 GLIBC_2.17)
set(version_dlmopen_aarch64 GLIBC_2.17)
set(version ${version_${CMAKE_SYSTEM_PROCESSOR}})
if(NOT version)
  message(FATAL_ERROR "LIGER_MANYLINUX_2_28: the processor is ${CMAKE_SYSTEM_PROCESSOR}, expected x86_64 or aarch64")
endif()

# Of these libraries: what the CUDA runtime and csrc/ call.
set(symbols_dl dladdr dlclose dlerror dlmopen dlopen dlsym dlvsym)
set(symbols_pthread
  pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create
  pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
  pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
  pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
  pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy
  pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy pthread_spin_init
  pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait
  sem_wait)
set(symbols_rt shm_open shm_unlink)
set(soversion_dl 2)
set(soversion_pthread 0)
set(soversion_rt 1)
set(folder ${CMAKE_CURRENT_BINARY_DIR}/glibc_2_28)
foreach(name dl pthread rt)
  set(nodes "")
  foreach(symbol ${symbols_${name}})
    set(its_version ${version})
    if(DEFINED version_${symbol}_${CMAKE_SYSTEM_PROCESSOR})
      set(its_version ${version_${symbol}_${CMAKE_SYSTEM_PROCESSOR}})
    endif()
    list(APPEND nodes ${its_version})
    list(APPEND exports_${its_version} ${symbol})
  endforeach()
  list(REMOVE_DUPLICATES nodes)
  set(map "")
  foreach(node ${nodes})
    list(JOIN exports_${node} "; " exported)
    string(APPEND map "${node} { global: ${exported}; };\n")
    unset(exports_${node})
  endforeach()
  file(CONFIGURE OUTPUT ${folder}/${name}.map CONTENT "${map}" @ONLY)
  list(TRANSFORM symbols_${name} REPLACE "(.+)" "void \\1(void) {}\n" OUTPUT_VARIABLE functions)
  list(JOIN functions "" functions)
  file(CONFIGURE OUTPUT ${folder}/${name}.cpp CONTENT "extern \"C\" {\n@functions@}\n" @ONLY)
  add_library(liger_stub_${name} SHARED ${folder}/${name}.cpp)
  set_target_properties(liger_stub_${name} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY ${folder}
    OUTPUT_NAME ${name}
    SOVERSION ${soversion_${name}}
    CXX_VISIBILITY_PRESET default)
  target_compile_options(liger_stub_${name} PRIVATE -fno-builtin)
  target_link_options(liger_stub_${name} PRIVATE LINKER:--version-script=${folder}/${name}.map -nostdlib)
  target_link_libraries(liger_manylinux INTERFACE liger_stub_${name})
endforeach()

target_sources(liger_manylinux INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/csrc/host/manylinux_2_28.cpp)
# The libraries export nothing but the module: torch finds the ops by what their constructors register.
file(WRITE ${folder}/exports.map "{ global: PyInit__C; local: *; };\n")
target_link_options(liger_manylinux INTERFACE LINKER:--version-script=${folder}/exports.map)
