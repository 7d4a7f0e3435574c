# SPDX-License-Identifier: BSD-3-Clause

# Whether to build the CUDA kernels, and for which architectures.
#
#   LIGER_BUILD_CUDA   auto (default): build them where nvcc is found; 1: nvcc is required; 0: leave them out
#   LIGER_CUDA_ARCHS   e.g. "80;90a" or "8.0 9.0a", or all; TORCH_CUDA_ARCH_LIST ("8.0;9.0a+PTX") is read when it is not
#                      set. Neither: the architectures of the GPUs of this machine; all where nvidia-smi finds none

set(LIGER_ALL_ARCHS 80 86 89 90a 100 120)

function(liger_setting name default)
  if(NOT DEFINED ${name})
    if(DEFINED ENV{${name}} AND NOT "$ENV{${name}}" STREQUAL "")
      set(${name} "$ENV{${name}}" PARENT_SCOPE)
    else()
      set(${name} "${default}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

liger_setting(LIGER_BUILD_CUDA auto)
liger_setting(LIGER_CUDA_ARCHS "")
set(LIGER_WITH_CUDA FALSE)
set(LIGER_CUDA_ARCHS_BUILT "")

string(TOLOWER "${LIGER_BUILD_CUDA}" cuda_wanted)
if(cuda_wanted MATCHES "^(1|on|true|yes)$")
  set(cuda_wanted 1)
elseif(cuda_wanted MATCHES "^(0|off|false|no)$")
  set(cuda_wanted 0)
elseif(NOT cuda_wanted STREQUAL "auto")
  message(FATAL_ERROR "LIGER_BUILD_CUDA is '${LIGER_BUILD_CUDA}', expected 0, 1 or auto")
endif()

if(NOT cuda_wanted STREQUAL "0")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER)
    # "Not found" is cached: forget it, so that a build folder sees an nvcc that was installed since.
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  # An explicit architecture keeps the compiler probe from asking for one that this nvcc may have dropped.
  set(CMAKE_CUDA_ARCHITECTURES 80)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    enable_language(CUDA)
    set(LIGER_WITH_CUDA TRUE)
  elseif(cuda_wanted STREQUAL "1")
    message(FATAL_ERROR "LIGER_BUILD_CUDA=1, but no CUDA compiler was found. Put nvcc on PATH or set CUDACXX.")
  endif()
endif()

if(NOT LIGER_WITH_CUDA)
  message(STATUS "liger: CPU and Triton build, without CUDA kernels (LIGER_BUILD_CUDA=${LIGER_BUILD_CUDA})")
  return()
endif()

# Architectures as numbers (80, 90a), from whichever setting was given.
set(archs "${LIGER_CUDA_ARCHS}")
if(archs STREQUAL "")
  set(archs "$ENV{TORCH_CUDA_ARCH_LIST}")
endif()
string(REGEX REPLACE "[ ,]+" ";" archs "${archs}")
# PTX is added below, whether asked for or not.
string(REGEX REPLACE "[+]PTX|[.]" "" archs "${archs}")

execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known_archs OUTPUT_STRIP_TRAILING_WHITESPACE)
string(REGEX MATCHALL "[0-9]+" known_archs "${known_archs}")
function(liger_arch_known arch out)
  string(REGEX REPLACE "[af]$" "" number "${arch}")
  if(number IN_LIST known_archs)
    set(${out} TRUE PARENT_SCOPE)
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Those GPUs of this machine that the kernels serve and nvcc knows.
function(liger_archs_of_this_machine out)
  set(found "")
  find_program(LIGER_NVIDIA_SMI nvidia-smi NO_CACHE)
  if(LIGER_NVIDIA_SMI AND NOT CMAKE_CROSSCOMPILING)
    execute_process(COMMAND ${LIGER_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE capabilities ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+[.][0-9]+" capabilities "${capabilities}")
    list(TRANSFORM capabilities REPLACE "[.]" "")
    list(TRANSFORM capabilities REPLACE "^90$" "90a")
    list(REMOVE_DUPLICATES capabilities)
    foreach(arch ${capabilities})
      liger_arch_known(${arch} known)
      string(REGEX REPLACE "a$" "" number ${arch})
      if(known AND number GREATER_EQUAL 80)
        list(APPEND found ${arch})
      endif()
    endforeach()
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

if(archs STREQUAL "")
  liger_archs_of_this_machine(archs)
  set(whose ", the GPUs of this machine; LIGER_CUDA_ARCHS=all for every one")
endif()
if(archs STREQUAL "all" OR archs STREQUAL "")
  set(whose "")
  set(archs "")
  foreach(arch ${LIGER_ALL_ARCHS})
    liger_arch_known(${arch} known)
    if(known)
      list(APPEND archs ${arch})
    endif()
  endforeach()
endif()
foreach(arch ${archs})
  liger_arch_known(${arch} known)
  if(NOT known)
    message(FATAL_ERROR "liger: CUDA architecture '${arch}' is not known to nvcc ${CMAKE_CUDA_COMPILER_VERSION}; "
                        "it knows ${known_archs}")
  endif()
endforeach()

# Machine code for each, and PTX of the newest generic one for devices that come later.
set(CMAKE_CUDA_ARCHITECTURES OFF)
set(gencode "")
set(newest "")
foreach(arch ${archs})
  list(APPEND gencode "SHELL:-gencode arch=compute_${arch},code=sm_${arch}")
  if(NOT arch MATCHES "[a-z]$" AND (newest STREQUAL "" OR arch GREATER newest))
    set(newest ${arch})
  endif()
endforeach()
set(built ${archs})
if(newest)
  list(APPEND gencode "SHELL:-gencode arch=compute_${newest},code=compute_${newest}")
  list(APPEND built "${newest}+PTX")
endif()
list(JOIN built " " LIGER_CUDA_ARCHS_BUILT)
message(STATUS "liger: CUDA ${CMAKE_CUDA_COMPILER_VERSION} kernels for ${LIGER_CUDA_ARCHS_BUILT}${whose}")

# ninja runs one nvcc per source and core; cores that this leaves over compile architectures side by side.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
list(LENGTH LIGER_CUDA_SOURCES sources)
math(EXPR nvcc_threads "(${cores} + ${sources} - 1) / ${sources}")

add_library(liger_cuda_flags INTERFACE)
add_library(liger::cuda ALIAS liger_cuda_flags)
target_include_directories(liger_cuda_flags INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# USE_CUDA opens the CUDA part of torch's stable C interface.
target_compile_definitions(liger_cuda_flags INTERFACE USE_CUDA)
target_compile_options(liger_cuda_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:${gencode}>"
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
  $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda>
  $<$<COMPILE_LANGUAGE:CUDA>:--threads=${nvcc_threads}>)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  target_compile_options(liger_cuda_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
endif()

# nvcc puts its process id into symbol names, directly and through the names of temporary files. With a seed and with
# temporary files that are named after the object, two builds from one source folder are identical.
function(liger_deterministic_names)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    foreach(source ${ARGN})
      set_source_files_properties(${source} PROPERTIES
        COMPILE_OPTIONS "--objdir-as-tempdir;--frandom-seed=${source}")
    endforeach()
  endif()
endfunction()
