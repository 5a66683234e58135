// Products of rows and a weight: for the few rows of a decoding forward as fast as the weight can be read.
//
// An output's sum runs over the inputs in their order, of bfloat16 two at a time, in float32, span by span, whatever other rows
// are in the call: its bits depend on its own row and channel alone. A halved weight gives the bits of the whole one.

#include "linear.h"

#define MAX_NEAR_INT8_ROWS 3  // as MAX_NEAR_ROWS
#define MIN_SHARED_BYTES (1 << 17) // of a weight: less is read before a helper is at it
#define REQUEST_PERMISSION 0x1023  // ARCH_REQ_XCOMP_PERM, see Linux' Documentation/arch/x86/xstate.rst
#define TILE_DATA 18               // XFEATURE_XTILE_DATA

#ifdef HAS_VERSIONS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512vnni,prefer-vector-width=512")
#define LANES 16
#define NAME(x) x##_int8
#include "linear_int8.h"
#pragma GCC pop_options
#endif

#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8,prefer-vector-width=512")
#include "linear_tiles.h"
#pragma GCC pop_options
#endif

#ifdef HAS_VERSIONS
static int has_wide_vectors(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// Return whether this processor multiplies pairs of bfloat16 in vectors of 512 bits.
int64_t specdec_has_pairs(void)
{
#ifdef HAS_VERSIONS
    return __builtin_cpu_supports("avx512bf16") && has_wide_vectors();
#else
    return 0;
#endif
}

// Return whether this processor multiplies bytes in vectors of 512 bits.
int64_t specdec_has_bytes(void)
{
#ifdef HAS_VERSIONS
    return __builtin_cpu_supports("avx512vnni") && has_wide_vectors();
#else
    return 0;
#endif
}

// Return whether this processor multiplies in tiles, and Linux lets this process use them, which has to be asked for.
int64_t specdec_has_tiles(void)
{
#ifdef HAS_TILES
    const int has_unit = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8");
    return has_unit && specdec_has_pairs() && specdec_has_bytes() && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
    return 0;
#endif
}

// Return how many bytes of memory `multiply` needs for so many rows.
int64_t specdec_product_room(const Weight *weight, int64_t num_rows)
{
#ifdef HAS_TILES
    if (weight->has_tiles)
        return tiles_room(weight, num_rows);
#endif
#ifdef HAS_VERSIONS
    return weight->scales ? num_rows * (2 * weight->num_in + (int64_t)sizeof(float)) : 0;
#else
    return 0;
#endif
}

// Arrange the rows as they are multiplied.
static void prepare(const Product *product)
{
#ifdef HAS_TILES
    if (product->weight.has_tiles)
        return product->weight.scales ? round_int8_rows(product) : fill_last(product);
#endif
#ifdef HAS_VERSIONS
    if (product->weight.scales)
        round_rows_int8(product);
#endif
}

// Compute the channels from `channel` to `end`; both begin a block.
static void multiply_channels(const Product *product, char *output, int64_t channel, int64_t end)
{
#ifdef HAS_VERSIONS
    const Weight *weight = &product->weight;
#ifdef HAS_TILES
    if (weight->has_tiles && weight->scales)
        return multiply_int8_tiles(product, output, channel, end);
    if (weight->has_tiles)
        return multiply_bf16_tiles(product, output, channel, end);
#endif
    if (weight->scales)
        multiply_channels_int8(product, output, channel, end);
    else if (weight->is_bf16)
        specdec_channels_bf16(product, output, channel, end);
    else if (weight->lanes == 16 && weight->is_halved)
        specdec_channels_halved_16(product, output, channel, end);
    else if (weight->lanes == 16)
        specdec_channels_16(product, output, channel, end);
    else if (weight->is_halved)
        specdec_channels_halved_8(product, output, channel, end);
    else
        specdec_channels_8(product, output, channel, end);
#endif
}

// Return the channel that a part begins with; the last part ends with the last channel.
static int64_t first_of(const Product *product, int64_t part)
{
    const int64_t channels = 2 * product->weight.lanes, num_blocks = (product->weight.num_out + channels - 1) / channels;
    const int64_t first = num_blocks * part / product->num_parts * channels;
    return first < product->weight.num_out ? first : product->weight.num_out;
}

static void compute_part(const void *task, int64_t part, char *output, char *room)
{
    (void)room;
    const Product *product = task;
    multiply_channels(product, output, first_of(product, part), first_of(product, part + 1));
}

static void copy_part(const void *task, int64_t part, const char *from, char *to)
{
    const Product *product = task;
    const int64_t first = first_of(product, part), count = first_of(product, part + 1) - first;
    const int64_t size = product->weight.is_bf16 ? 2 : 4;
    for (int64_t row = 0; row < product->num_rows; row++) {
        const int64_t place = (row * product->weight.num_out + first) * size;
        memcpy(to + place, from + place, (size_t)(count * size));
    }
}

// Compute rows @ weight.T + bias: with weights of 8 bits where specdec_has_bytes, of bfloat16 where specdec_has_pairs, of
// float32 where vectors have the weight's lanes, 8 or 16. The number of inputs is one of whole steps.
void specdec_multiply(const Weight *weight, const void *rows, void *output, int64_t num_rows, char *room)
{
    if (!num_rows)
        return;
    Product product = {*weight, rows, room, num_rows, 1};
    const int64_t size = weight->is_bf16 ? 2 : 4, stored = weight->scales ? 1 : weight->is_halved ? 2 : size;
    const int64_t weight_bytes = weight->num_in * weight->num_out * stored;
    const int64_t row_bytes = WHOLE_LINES(num_rows * weight->num_in * size), output_bytes = num_rows * weight->num_out * size;
    char *shared = NULL;
    if (weight_bytes >= MIN_SHARED_BYTES)
        shared = specdec_room_to_share(row_bytes + specdec_product_room(weight, num_rows), output_bytes, 0);
    if (!shared) {
        prepare(&product);
        return multiply_channels(&product, output, 0, weight->num_out);
    }
    // what helpers read must live as long as they do
    memcpy(shared, rows, (size_t)(num_rows * weight->num_in * size));
    product.rows = shared;
    product.room = shared + row_bytes;
    prepare(&product);
    const int64_t num_blocks = (weight->num_out + 2 * weight->lanes - 1) / (2 * weight->lanes);
    product.num_parts = num_blocks < MAX_PARTS ? num_blocks : MAX_PARTS;
    specdec_share(&(Job){compute_part, copy_part, &product, output, NULL, sizeof product, output_bytes, product.num_parts, 1});
}
