# Adds to psstore_core the kernels that the target's instruction sets allow, each file with its flags.
#
# -O3 in every build type but the sanitized ones, whose checked loops are not vectorised: the vectoriser is what
# makes these fast. There -O1, for what tests/cpp/test_addresses.py holds of small functions of headers: that each
# instruction set has them inlined. No errno and no trapping from sqrt and comparisons: neither changes a result, both would
# keep loops from being vectorised. openmp-simd is the pragma alone.
set(PSSTORE_KERNEL_FLAGS -fopenmp-simd -fno-math-errno -fno-trapping-math)
if(PSSTORE_SANITIZE)
  list(APPEND PSSTORE_KERNEL_FLAGS -O1)
else()
  list(APPEND PSSTORE_KERNEL_FLAGS -O3)
endif()

set_source_files_properties(csrc/kernels/plain.cc PROPERTIES COMPILE_OPTIONS "${PSSTORE_KERNEL_FLAGS}"
  SKIP_UNITY_BUILD_INCLUSION ON)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND NOT PSSTORE_PORTABLE)
  target_sources(psstore_core PRIVATE
    csrc/kernels/x86/avx2.cc csrc/kernels/x86/avx512.cc csrc/kernels/x86/runnable.cc)
  set_source_files_properties(csrc/kernels/x86/avx2.cc PROPERTIES COMPILE_OPTIONS
    "${PSSTORE_KERNEL_FLAGS};-mavx2;-mfma;-mf16c")
  # 256 bits at a time where the compiler chooses: as fast from memory as 512 on aligned data, and 1.6 times as fast on unaligned data
  # (measured on Zen 5, SGD), where every 512-bit access would cross a cache line.
  set_source_files_properties(csrc/kernels/x86/avx512.cc PROPERTIES COMPILE_OPTIONS
    "${PSSTORE_KERNEL_FLAGS};-mavx2;-mfma;-mf16c;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=256")
else()
  target_sources(psstore_core PRIVATE csrc/kernels/portable/runnable.cc)
endif()
