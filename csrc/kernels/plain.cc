// The kernels for the target's baseline: the reference that the other sets are tested against.
#include "kernels/codec_decode.h"
#include "kernels/codec_encode.h"
#include "kernels/convert.h"
#include "kernels/kernel_set.h"
#include "kernels/loops.h"
#include "kernels/row_steps.h"
#include "kernels/squares.h"

namespace psstore {

const KernelSet kPlainKernels{"plain",
                              reduce_update_loop<ElementSums>,
                              reduced_squares_loop<ElementSums>,
                              convert_loop<ElementConversions>,
                              all_finite_loop,
                              encode_loop<ElementEncoders>,
                              decode_loop,
                              step_rows_loop<ElementSums>};

}  // namespace psstore
