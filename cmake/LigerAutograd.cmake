# SPDX-License-Identifier: BSD-3-Clause

# The library with autograd nodes in C++ (csrc/autograd), built against the full C++ API of a torch version.

option(LIGER_BUILD_AUTOGRAD "Autograd nodes in C++ for the torch that is built with" ON)
set(LIGER_AUTOGRAD_TORCH_DIRS "" CACHE STRING "Folders of further torch versions to build the autograd nodes for")

# The version of a torch folder, and the part of it that a library depends on: a release keeps its ABI within major.minor,
# anything else is one of its kind. python/liger/_core/runtime/load.py does the same.
function(liger_torch_abi folder result)
  file(STRINGS ${folder}/version.py line REGEX "^__version__[^=]*=")
  string(REGEX REPLACE ".*= *['\"](.+)['\"].*" "\\1" version "${line}")
  if(version MATCHES "^([0-9]+)\\.([0-9]+)\\.[0-9]+([+].*)?$")
    set(${result} "${CMAKE_MATCH_1}_${CMAKE_MATCH_2}" PARENT_SCOPE)
  else()
    string(REGEX REPLACE "[^0-9A-Za-z]" "_" version "${version}")
    set(${result} "${version}" PARENT_SCOPE)
  endif()
endfunction()

function(liger_add_autograd folder)
  if(NOT EXISTS ${folder}/include/torch/csrc/autograd/saved_variable.h)
    message(STATUS "liger: no autograd nodes in C++: ${folder} has no headers of torch::autograd")
    return()
  endif()
  liger_torch_abi(${folder} abi)
  set(target liger_autograd_${abi})
  if(TARGET ${target})
    return()
  endif()
  message(STATUS "liger: autograd nodes in C++ for torch ${abi}")
  add_library(${target} MODULE csrc/autograd/nodes.cpp)
  # Not liger::torch, which restricts the headers to the stable ABI.
  target_include_directories(${target} SYSTEM PRIVATE ${folder}/include ${folder}/include/torch/csrc/api/include)
  target_link_libraries(${target} PRIVATE
    liger::manylinux ${folder}/lib/libtorch_cpu.so ${folder}/lib/libc10.so liger::runtime)
  target_compile_options(${target} PRIVATE -ffile-prefix-map=${folder}/=torch/)
  liger_install(${target})
endfunction()
