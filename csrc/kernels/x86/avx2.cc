// The kernels for AVX2 with fused multiply-add (Haswell, Zen and later).
#define PSSTORE_INSTRUCTION_SET avx2
#include "kernels/codec_decode.h"
#include "kernels/codec_encode.h"
#include "kernels/convert.h"
#include "kernels/loops.h"
#include "kernels/row_steps.h"
#include "kernels/squares.h"
#include "kernels/x86/registers256.h"
#include "kernels/x86/sets.h"
#include "kernels/x86/vector_conversions.h"
#include "kernels/x86/vector_encoders.h"
#include "kernels/x86/vector_sums.h"

namespace psstore {

const KernelSet kAvx2Kernels{"avx2",
                             reduce_update_loop<VectorSums<Registers256>>,
                             reduced_squares_loop<VectorSums<Registers256>>,
                             convert_loop<VectorConversions<Registers256>>,
                             all_finite_loop,
                             encode_loop<VectorEncoders<Registers256>>,
                             decode_loop,
                             step_rows_loop<VectorSums<Registers256>>};

}  // namespace psstore
