# SPDX-License-Identifier: BSD-3-Clause

# torch's headers and libraries, straight from the torch that the build Python would import.
#
# find_package(Torch) is avoided on purpose: it fails on a CUDA torch without nvcc, overrides the architecture list and
# links every CUDA library. The stable ABI needs the headers and two libraries.

if(NOT LIGER_TORCH_DIR)  # that of another platform, when cross-compiling
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u, pathlib as p; s = u.find_spec('torch'); print(p.Path(s.origin).parent if s else '')"
    OUTPUT_VARIABLE LIGER_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT LIGER_TORCH_DIR)
    message(FATAL_ERROR "liger: torch is not installed for ${Python_EXECUTABLE}. Install torch >= 2.10, or build with "
                        "isolation (pip install .), which fetches one.")
  endif()
endif()
file(STRINGS ${LIGER_TORCH_DIR}/version.py version_line REGEX "^__version__[^=]*=")
string(REGEX REPLACE ".*= *['\"](.+)['\"].*" "\\1" LIGER_TORCH_VERSION "${version_line}")
if(LIGER_TORCH_VERSION VERSION_LESS 2.10)
  message(FATAL_ERROR "liger: torch ${LIGER_TORCH_VERSION} at ${LIGER_TORCH_DIR} is too old: 2.10 is the oldest supported.")
endif()
message(STATUS "liger: torch ${LIGER_TORCH_VERSION}")

add_library(liger_torch INTERFACE)
add_library(liger::torch ALIAS liger_torch)
target_include_directories(liger_torch SYSTEM INTERFACE ${LIGER_TORCH_DIR}/include)
# 2.10: one binary for it and every later torch.
target_compile_definitions(liger_torch INTERFACE TORCH_TARGET_VERSION=0x020a000000000000ULL)
# libtorch.so is what pulls libtorch_cuda.so in, on a torch that has one; a linker would drop it as unused here.
target_link_options(liger_torch INTERFACE LINKER:--no-as-needed)
target_link_libraries(liger_torch INTERFACE ${LIGER_TORCH_DIR}/lib/libtorch.so ${LIGER_TORCH_DIR}/lib/libtorch_cpu.so)

# Exceptions cross into torch, so both must share one C++ runtime; a toolchain that would link its static copy gets the
# shared one named. Symbols of static libraries (the CUDA runtime) stay inside, where no other library can take them over.
add_library(liger_runtime INTERFACE)
add_library(liger::runtime ALIAS liger_runtime)
execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
                OUTPUT_VARIABLE shared_runtime OUTPUT_STRIP_TRAILING_WHITESPACE)
if(IS_ABSOLUTE "${shared_runtime}")
  target_link_libraries(liger_runtime INTERFACE ${shared_runtime})
endif()
target_link_options(liger_runtime INTERFACE LINKER:--exclude-libs,ALL)
target_link_libraries(liger_torch INTERFACE liger::runtime)
