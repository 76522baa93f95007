# CMake includes it in the build of ik-llama-cpp-python: what its source distribution lacks, and what the build may leave
# out. It then takes 4 minutes on two cores.
set(common ${CMAKE_SOURCE_DIR}/vendor/ik_llama.cpp/common)
# The script that writes the build's number, which nothing here reads, into a source file.
file(WRITE ${common}/cmake/build-info-gen-cpp.cmake
     "set(BUILD_NUMBER 0)\nconfigure_file(${common}/build-info.cpp.in ${common}/build-info.cpp)\n")
set(CMAKE_INSTALL_RPATH "$ORIGIN" "$ORIGIN/../lib")  # or neither library nor llama-quantize finds the other one
set(GGML_IQK_FA_ALL_QUANTS OFF CACHE BOOL "")  # flash attention over caches of other types takes most of the build
add_compile_options(-w)  # 600,000 lines of log
