# find_package(infini): imported targets of the libraries that lie beside this file's folder.
#   infini::infinirt  infini::infiniop  infini::infiniccl     the C libraries
#   infini::infinicore_cpp_api                                 InfiniCore's C++ interface, C++17, on these
get_filename_component(_infini_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(infini_VERSION "@VERSION@")

foreach(_infini_name infinirt infiniop infiniccl infinicore_cpp_api)
  if(NOT TARGET infini::${_infini_name})
    add_library(infini::${_infini_name} SHARED IMPORTED)
    set_target_properties(infini::${_infini_name} PROPERTIES
      IMPORTED_LOCATION "${_infini_root}/lib/lib${_infini_name}.so"
      IMPORTED_SONAME "lib${_infini_name}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${_infini_root}/include")
  endif()
endforeach()

target_link_libraries(infini::infiniop INTERFACE infini::infinirt)
target_link_libraries(infini::infiniccl INTERFACE infini::infinirt)
target_link_libraries(infini::infinicore_cpp_api INTERFACE infini::infiniop infini::infiniccl infini::infinirt)
target_compile_features(infini::infinicore_cpp_api INTERFACE cxx_std_17)
unset(_infini_root)
unset(_infini_name)
