// Which instruction sets beyond its architecture's own this processor has and the operating system saves registers of.
#pragma once

namespace neoflex {

#if defined(NEOFLEX_X86)
bool has_avx2();         // with FMA and F16C
bool has_avx512();       // F, BW, VL and DQ, and AVX2
bool has_avx512_bf16();  // and VNNI, and AVX-512
#endif

}  // namespace neoflex
