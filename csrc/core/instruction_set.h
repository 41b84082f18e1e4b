// The namespace of what is compiled anew for each instruction set.
//
// A file that is compiled with the flags of one (kernels.cmake) names it before it includes anything. What two
// such files instantiate under one name the linker would keep once, and a plain machine could end up running
// AVX-512 code.
#pragma once

#ifndef PSSTORE_INSTRUCTION_SET
#define PSSTORE_INSTRUCTION_SET baseline
#endif
