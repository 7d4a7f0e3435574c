# SPDX-License-Identifier: BSD-3-Clause

# Compiler settings shared by every target, and the install rule.

set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

foreach(cache_name sccache ccache)
  find_program(LIGER_${cache_name} ${cache_name})
  if(LIGER_${cache_name} AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(CMAKE_CXX_COMPILER_LAUNCHER ${LIGER_${cache_name}})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${LIGER_${cache_name}})
    message(STATUS "liger: compiling through ${LIGER_${cache_name}}")
  endif()
endforeach()

# Flags and folders of every target.
function(liger_compile target)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/csrc)
  # A plain flag, not CXX_STANDARD: CUDA inherits that, and CMake 3.25, in wide use, knows no nvcc with standard 20.
  target_compile_options(${target} PRIVATE -std=c++20 $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  # Error messages name source files; without the folders of the build machine, which would also make builds differ.
  foreach(map ${CMAKE_CURRENT_SOURCE_DIR}/= ${LIGER_TORCH_DIR}/=torch/)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${map}>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${map}>)
  endforeach()
endfunction()

# Into the package folder; torch's libraries are found beside it in site-packages, or are loaded already.
function(liger_install target)
  liger_compile(${target})
  set_target_properties(${target} PROPERTIES
    INSTALL_RPATH "$ORIGIN/../torch/lib"
    BUILD_WITH_INSTALL_RPATH ON)
  install(TARGETS ${target} LIBRARY DESTINATION liger)
endfunction()
