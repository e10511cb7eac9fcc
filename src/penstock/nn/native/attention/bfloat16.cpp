// Attention of bfloat16 queries, over pages of their type and of 8 bits.
#include "attention/units.h"

namespace penstock::attention {

template void attend(Threads&, const Task<bf16, bf16>&, const Plan&, Partials&, std::atomic<int64_t>&);
template void attend(Threads&, const Task<bf16, Code>&, const Plan&, Partials&, std::atomic<int64_t>&);

}  // namespace penstock::attention
