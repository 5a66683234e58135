// Products of rows and a weight: what their files share. One file for each type of numbers: each takes its compiler long.

#include "kernels.h"

#define SPAN_BYTES 512  // of a row, added up by themselves: a long sum of float32 loses digits
#define NEAR 8192       // bytes of the weight between what is multiplied and what is fetched to the first cache
#define FAR 65536       // and, by processors that fetch far, to the second
#define MAX_NEAR_ROWS 5 // that such a processor multiplies with what it fetches by itself

// One product.
typedef struct {
    Weight weight;
    const char *rows;  // [num_rows, num_in]
    char *room;        // of specdec_product_room bytes
    int64_t num_rows, num_parts;
} Product;

#ifdef HAS_VERSIONS
// Return whether the weight is fetched far ahead to the second cache, as sums and memory do not hide behind one another
// otherwise: on Zen 4, as measured (docs/benchmarks.md). On Zen 5 and Intel's processors fetching near does it.
static inline int fetches_far(void)
{
    return __builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f");
}

// Compute the channels from `channel` to `end`: of bfloat16, of float32, of float32 of which halves are stored; in vectors of
// 16 or 8 floats.
void specdec_channels_bf16(const Product *product, void *output, int64_t channel, int64_t end);
void specdec_channels_16(const Product *product, void *output, int64_t channel, int64_t end);
void specdec_channels_8(const Product *product, void *output, int64_t channel, int64_t end);
void specdec_channels_halved_16(const Product *product, void *output, int64_t channel, int64_t end);
void specdec_channels_halved_8(const Product *product, void *output, int64_t channel, int64_t end);
#endif
