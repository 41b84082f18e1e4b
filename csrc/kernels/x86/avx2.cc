// The kernels for AVX2 with fused multiply-add (Haswell, Zen and later).
#include "kernels/codec_loops.h"
#include "kernels/convert.h"
#include "kernels/loops.h"
#include "kernels/squares.h"
#include "kernels/x86/sets.h"

namespace psstore {

const KernelSet kAvx2Kernels{"avx2",       reduce_update_loop, reduced_squares_loop,
                             convert_loop, all_finite_loop,    encode_loop,
                             decode_loop};

}  // namespace psstore
