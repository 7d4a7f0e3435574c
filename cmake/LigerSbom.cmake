# SPDX-License-Identifier: BSD-3-Clause

# A software bill of materials in .dist-info/sboms (PEP 770): what the libraries contain beside this project's own code.
# Without time and serial number, so that two builds are identical.

# name, version, license as a JSON object, description, further fields
function(liger_sbom_component name version license description)
  string(APPEND LIGER_SBOM_COMPONENTS ",
    {
      \"type\": \"library\",
      \"bom-ref\": \"${name}@${version}\",
      \"name\": \"${name}\",
      \"version\": \"${version}\",${ARGN}
      \"description\": \"${description}\",
      \"licenses\": [${license}]
    }")
  string(APPEND LIGER_SBOM_REFS ", \"${name}@${version}\"")
  set(LIGER_SBOM_COMPONENTS "${LIGER_SBOM_COMPONENTS}" PARENT_SCOPE)
  set(LIGER_SBOM_REFS "${LIGER_SBOM_REFS}" PARENT_SCOPE)
endfunction()

# The same of a package of the package index.
macro(liger_sbom_package name version description)
  liger_sbom_component(${name} "${version}" [[{"license": {"id": "BSD-3-Clause"}}]] "${description}"
    "
      \"purl\": \"pkg:pypi/${name}@${version}\",")
endmacro()

# After all libraries: LIGER_EXTENSION_TORCHES and LIGER_PYBIND11_VERSION are of the liger._C that there are.
function(liger_add_sbom)
  # A local label such as +cpu is no part of the name of a release.
  string(REGEX REPLACE "[+].*" "" torch_release "${LIGER_TORCH_VERSION}")
  set(LIGER_SBOM_COMPONENTS "")
  set(LIGER_SBOM_REFS "")
  set(LIGER_SBOM_PURL "pkg:pypi/liger-ops@${SKBUILD_PROJECT_VERSION_FULL}")

  liger_sbom_package(torch "${torch_release}" "headers, compiled into every library")
  get_property(torches GLOBAL PROPERTY LIGER_EXTENSION_TORCHES)
  if(torches)
    list(TRANSFORM torches REPLACE "[+].*" "")
    list(REMOVE_DUPLICATES torches)
    list(REMOVE_ITEM torches "${torch_release}")
    foreach(version ${torches})
      liger_sbom_package(torch "${version}" "headers, compiled into liger._C for this torch")
    endforeach()
    get_property(version GLOBAL PROPERTY LIGER_PYBIND11_VERSION)
    liger_sbom_package(pybind11 "${version}" "headers, compiled into liger._C")
  endif()
  if(LIGER_WITH_CUDA)
    set(toolkit_license [[{"license": {"name": "NVIDIA CUDA Toolkit EULA", "url": "https://docs.nvidia.com/cuda/eula/"}}]])
    liger_sbom_component(cuda-cudart "${CMAKE_CUDA_COMPILER_VERSION}" "${toolkit_license}"
      "libcudart_static.a and headers of this CUDA toolkit, in libliger_cuda.so")
    foreach(name nvtx cccl)
      liger_sbom_component(${name} "${CMAKE_CUDA_COMPILER_VERSION}" [[{"expression": "Apache-2.0 WITH LLVM-exception"}]]
        "headers of this CUDA toolkit, compiled into libliger_cuda.so")
    endforeach()
  endif()
  string(REGEX REPLACE "^,\n" "" LIGER_SBOM_COMPONENTS "${LIGER_SBOM_COMPONENTS}")
  string(REGEX REPLACE "^, " "" LIGER_SBOM_REFS "${LIGER_SBOM_REFS}")

  configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/sbom.cdx.json.in ${CMAKE_CURRENT_BINARY_DIR}/liger-ops.cdx.json
    @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/liger-ops.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms)
endfunction()
