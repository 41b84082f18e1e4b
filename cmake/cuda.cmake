# Decides whether the CUDA kernels are built, from PSSTORE_CUDA; sets PSSTORE_HAVE_CUDA.
#
# "auto" builds them where there is a GPU: without one they would be most of the build's time and never run.
# It must never break a build: an nvcc that can't compile (its host compiler is too new, its toolkit is half
# installed) counts as no nvcc. check_language tries in a project of its own.

# Native code for Turing and Hopper, and PTX 8.0 that the driver compiles for what is in between or newer.
# Each entry compiles every kernel once more; set CMAKE_CUDA_ARCHITECTURES to choose others.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "75-real;80-virtual;90-real")
endif()

set(PSSTORE_HAVE_CUDA OFF)
if(PSSTORE_CUDA STREQUAL "on")
  enable_language(CUDA)
  set(PSSTORE_HAVE_CUDA ON)
elseif(PSSTORE_CUDA STREQUAL "auto")
  # The driver's control device, on Linux and under WSL: there before CUDA is installed, and in containers.
  if(EXISTS /dev/nvidiactl OR EXISTS /dev/dxg)
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      # The kernels include the core's C++20 headers: nvcc >= 12, and a CMake that knows it (3.26).
      if(cuda_std_20 IN_LIST CMAKE_CUDA_COMPILE_FEATURES)
        set(PSSTORE_HAVE_CUDA ON)
      endif()
    endif()
  endif()
elseif(NOT PSSTORE_CUDA STREQUAL "off")
  message(FATAL_ERROR "PSSTORE_CUDA is '${PSSTORE_CUDA}'; expected auto, on or off")
endif()
message(STATUS "psstore: CUDA kernels: ${PSSTORE_HAVE_CUDA}")

if(PSSTORE_HAVE_CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  # The static runtime looks for the driver at its first call, so that the extension loads without one.
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  # --fmad=false is -ffp-contract=off for the device. Division, square root and denormals are IEEE's unless
  # fast math is asked for, which it must never be.
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Xcompiler=-ffp-contract=off>")
endif()
