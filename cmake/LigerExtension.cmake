# SPDX-License-Identifier: BSD-3-Clause

# liger._C (csrc/autograd): one library for each pair of a Python and a torch, against the full C++ API of that torch.

option(LIGER_BUILD_EXTENSION "liger._C for the Python and the torch that are built with" ON)
set(LIGER_EXTENSION_TORCH_DIRS "" CACHE STRING "Folders of further torch versions to build liger._C for")
set(LIGER_EXTENSION_PYTHONS "" CACHE STRING "Further Python interpreters to build liger._C for")

# The version of a torch folder, and the part of it that a library depends on: a release keeps its ABI within major.minor,
# anything else is one of its kind. python/liger/_core/runtime/load.py does the same.
function(liger_torch_abi folder result found)
  file(STRINGS ${folder}/version.py line REGEX "^__version__[^=]*=")
  string(REGEX REPLACE ".*= *['\"](.+)['\"].*" "\\1" version "${line}")
  set(${found} "${version}" PARENT_SCOPE)
  if(version MATCHES "^([0-9]+)\\.([0-9]+)\\.[0-9]+([+].*)?$")
    set(${result} "${CMAKE_MATCH_1}_${CMAKE_MATCH_2}" PARENT_SCOPE)
  else()
    string(REGEX REPLACE "[^0-9A-Za-z]" "_" version "${version}")
    set(${result} "${version}" PARENT_SCOPE)
  endif()
endfunction()

# What an interpreter prints.
function(liger_ask_python python code result)
  execute_process(COMMAND ${python} -c "${code}" OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${answer}" PARENT_SCOPE)
endfunction()

function(liger_add_extension python folder)
  liger_ask_python(${python} "import sys; print(sys.implementation.cache_tag.replace('-', '_') + sys.abiflags)" abi)
  liger_ask_python(${python} "import sysconfig; print(sysconfig.get_path('include'))" include)
  foreach(header ${include}/Python.h ${folder}/include/torch/csrc/autograd/saved_variable.h)
    if(NOT EXISTS ${header})
      message(STATUS "liger: no liger._C for ${python} and ${folder}: ${header} is missing")
      return()
    endif()
  endforeach()
  liger_torch_abi(${folder} torch version)
  set(target liger_C_${abi}_torch_${torch})
  if(TARGET ${target})
    return()
  endif()
  message(STATUS "liger: liger._C for ${abi} and torch ${torch}")
  set_property(GLOBAL APPEND PROPERTY LIGER_EXTENSION_TORCHES ${version})
  # Not liger::torch, which restricts the headers to the stable ABI.
  set(includes ${folder}/include ${folder}/include/torch/csrc/api/include)
  # The nodes know no Python: one compilation for all.
  set(nodes liger_nodes_torch_${torch})
  if(NOT TARGET ${nodes})
    add_library(${nodes} OBJECT csrc/autograd/losses.cpp csrc/autograd/nodes.cpp)
    target_include_directories(${nodes} SYSTEM PRIVATE ${includes})
    target_compile_options(${nodes} PRIVATE -ffile-prefix-map=${folder}/=torch/)
    liger_compile(${nodes})
  endif()
  add_library(${target} MODULE csrc/autograd/module.cpp $<TARGET_OBJECTS:${nodes}>)
  # The headers of pybind11 come before those in torch.
  target_include_directories(${target} SYSTEM PRIVATE ${LIGER_PYBIND11_INCLUDE} ${include} ${includes})
  target_link_libraries(${target} PRIVATE liger::manylinux
    ${folder}/lib/libtorch_python.so ${folder}/lib/libtorch_cpu.so ${folder}/lib/libc10.so liger::runtime)
  target_compile_options(${target} PRIVATE -ffile-prefix-map=${folder}/=torch/ -ffile-prefix-map=${include}/=python/
                         -ffile-prefix-map=${LIGER_PYBIND11_INCLUDE}/=pybind11/)
  liger_install(${target})
endfunction()

function(liger_add_extensions)
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import pybind11; print(pybind11.get_include())"
                  OUTPUT_VARIABLE LIGER_PYBIND11_INCLUDE OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT LIGER_PYBIND11_INCLUDE)
    message(STATUS "liger: no liger._C: pybind11 is not installed for ${Python_EXECUTABLE}")
    return()
  endif()
  liger_ask_python(${Python_EXECUTABLE} "import pybind11; print(pybind11.__version__)" version)
  set_property(GLOBAL PROPERTY LIGER_PYBIND11_VERSION ${version})
  foreach(python ${Python_EXECUTABLE} ${LIGER_EXTENSION_PYTHONS})
    foreach(folder ${LIGER_TORCH_DIR} ${LIGER_EXTENSION_TORCH_DIRS})
      liger_add_extension(${python} ${folder})
    endforeach()
  endforeach()
endfunction()
