// The kernels for AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later).
#define PSSTORE_INSTRUCTION_SET avx512
#include "kernels/codec_decode.h"
#include "kernels/codec_encode.h"
#include "kernels/convert.h"
#include "kernels/loops.h"
#include "kernels/row_steps.h"
#include "kernels/squares.h"
#include "kernels/x86/registers512.h"
#include "kernels/x86/sets.h"
#include "kernels/x86/vector_conversions.h"
#include "kernels/x86/vector_encoders.h"
#include "kernels/x86/vector_sums.h"

namespace psstore {

const KernelSet kAvx512Kernels{"avx512",
                               reduce_update_loop<VectorSums<Registers512>>,
                               reduced_squares_loop<VectorSums<Registers512>>,
                               convert_loop<VectorConversions<Registers512>>,
                               all_finite_loop,
                               encode_loop<VectorEncoders<Registers512>>,
                               decode_loop,
                               step_rows_loop<VectorSums<Registers512>>};

}  // namespace psstore
