// Attention of the new tokens of many sequences, in one call a layer.
//
// A token's sums run over the positions of its own text, in blocks of BLOCK that begin at its first position, whatever
// else is in the call: its bits depend on its text alone. Softmax is computed block by block (Milakov and Gimelshein
// 2018, algorithm 3; Dao et al. 2022). All sums are float32.

#include "kernels.h"

#define BLOCK 64
#define MAX_ROWS 33    // that go through a block of keys together: a round's
#define LEAST -1e30f   // a score that weighs nothing
#define MIN_SHARED_BYTES (1 << 17) // of keys and values: less is read before a helper is at it
#define VALUE_CHUNKS 2 // vectors of a value that are added up together

// One query head between two blocks: the largest score yet, and the weights relative to e^most, added up lane by lane.
typedef struct {
    float most, totals[16];
} State;

// Where the keys and values lie that a row sees of a block, as floats; after them more keys, scored and not counted.
typedef struct {
    const float *keys[BLOCK + 16], *values[BLOCK];
    const void *turned; // where keys are multiplied in pairs: 16 in a vector
} Block;

static ALWAYS_INLINE void pad(Block *block, int64_t count)
{
    for (int64_t index = count; count > 0 && index < BLOCK + 16; index++)
        block->keys[index] = block->keys[0];
}

static ALWAYS_INLINE int64_t slot_on_path(const Attention *all, const Row *row, int64_t position)
{
    return all->slots[row->path + position - row->num_linear];
}

// Return the first position that a row sees.
static ALWAYS_INLINE int64_t first_seen(const Attention *all, const Row *row)
{
    return all->window && row->end > all->window ? row->end - all->window : 0;
}

// Return how many rows, from the first on, belong to one text.
static int num_of_one_text(const Row *rows, int64_t num_rows)
{
    int count = 1;
    while (count < num_rows && count < MAX_ROWS && rows[count].first_slot == rows[0].first_slot)
        count++;
    return count;
}

// Let the processor fetch one head's key and value of a slot, as they are wanted soon: without that a forward waits for memory
// most of the time. They may lie outside the pool.
static ALWAYS_INLINE void fetch(const Attention *all, int64_t slot, int64_t head, const int is_bf16)
{
    const int64_t place = slot * all->slot_heads + head, size = is_bf16 ? 2 : 4;
    const char *key = (const char *)all->keys + place * all->key_size * size;
    const char *value = (const char *)all->values + place * all->value_size * size;
    for (int64_t byte = 0; byte < all->key_size * size; byte += 64)
        __builtin_prefetch(key + byte);
    for (int64_t byte = 0; byte < all->value_size * size; byte += 64)
        __builtin_prefetch(value + byte);
}

#ifdef HAS_VERSIONS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
// Copy 16 rows of 16 pairs of numbers, from `byte` on, so that a pair of all rows lies side by side.
static ALWAYS_INLINE void transpose(const char *const *rows, int64_t byte, uint32_t *columns)
{
    __m512i a[16], b[16];
    UNROLLED for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(rows[i] + byte);
    UNROLLED for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    UNROLLED for (int i = 0; i < 16; i += 4)
        UNROLLED for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
        }
    UNROLLED for (int j = 0; j < 4; j++) {
        const __m512i even = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i later_even = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i later_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(columns + 16 * j, _mm512_shuffle_i32x4(even, later_even, 0x88));
        _mm512_storeu_si512(columns + 16 * (4 + j), _mm512_shuffle_i32x4(odd, later_odd, 0x88));
        _mm512_storeu_si512(columns + 16 * (8 + j), _mm512_shuffle_i32x4(even, later_even, 0xdd));
        _mm512_storeu_si512(columns + 16 * (12 + j), _mm512_shuffle_i32x4(odd, later_odd, 0xdd));
    }
}

#define LANES 16
#define IS_PAIRED 0
#define NAME(x) x##_16
#include "attention_lanes.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")
#define LANES 16
#define IS_PAIRED 1
#define NAME(x) x##_pairs
#include "attention_lanes.h"
#pragma GCC pop_options
#ifdef HAS_TILES
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16,prefer-vector-width=512")
#include "attention_tiles.h"
#pragma GCC pop_options
#endif
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define IS_PAIRED 0
#define NAME(x) x##_8
#include "attention_lanes.h"
#pragma GCC pop_options
#endif
#define LANES 4
#define IS_PAIRED 0
#define NAME(x) x##_4
#include "attention_lanes.h"

// Return how many bytes `attend` needs beside its arguments.
int64_t specdec_room(const Attention *all)
{
    const int64_t padded = (all->key_size + 15) / 16 * 16 + (all->value_size + 15) / 16 * 16;
    return (int64_t)sizeof(float) * (MAX_ROWS * all->num_heads * (padded + 17) + 2 * BLOCK * padded);
}

// Return how many floats this processor's vectors have, of those that `attend` is built for.
int64_t specdec_lanes(void)
{
#ifdef HAS_VERSIONS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq"))
        return 16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return 8;
#endif
    return 4;
}

#ifdef HAS_VERSIONS
// Return whether keys are multiplied in pairs. A window begins within a block, where a turned block cannot be begun.
static int goes_in_pairs(const Attention *all)
{
    return all->is_bf16 && all->lanes == 16 && !all->window && all->key_size % 32 == 0 && specdec_has_pairs();
}
#endif

// Attend for some rows. `room` has specdec_room bytes.
void specdec_attend(const Attention *all, const Row *rows, int64_t num_rows, float *room)
{
#ifdef HAS_TILES
    if (all->has_tiles && all->is_bf16 && fits_tiles(all->key_size) && fits_tiles(all->value_size))
        return attend_all_tiles(all, rows, num_rows, room);
#endif
#ifdef HAS_VERSIONS
    if (goes_in_pairs(all))
        attend_pairs(all, rows, num_rows, room);
    else if (all->lanes == 16)
        attend_16(all, rows, num_rows, room);
    else if (all->lanes == 8)
        attend_8(all, rows, num_rows, room);
    else
#endif
        attend_4(all, rows, num_rows, room);
}

// The attention of several threads: each part is some key heads of some texts, whose query heads go with them. Behind it lie
// its rows, where each text begins among them, the trees' paths, and the sinks.
typedef struct {
    Attention all;
    int64_t num_rows, num_texts, num_paths, num_parts;
} Shared;

static Row *rows_of(const Shared *shared)
{
    return (Row *)(shared + 1);
}

static int64_t *texts_of(const Shared *shared)
{
    return (int64_t *)(rows_of(shared) + shared->num_rows);
}

static int64_t *paths_of(const Shared *shared)
{
    return texts_of(shared) + shared->num_texts + 1;
}

static float *sinks_of(const Shared *shared)
{
    return (float *)(paths_of(shared) + shared->num_paths);
}

// Return the first of the heads of all texts, one after the other, that a part has.
static int64_t first_head_of(const Shared *shared, int64_t part)
{
    return shared->num_texts * shared->all.num_kv_heads * part / shared->num_parts;
}

// Attend with one key head of one text.
static void attend_head(const Shared *shared, int64_t number, char *output, char *room)
{
    const Attention *all = &shared->all;
    const int64_t text = number / all->num_kv_heads, head = number % all->num_kv_heads, size = all->is_bf16 ? 2 : 4;
    const int64_t group = all->num_heads / all->num_kv_heads, first = texts_of(shared)[text];
    Attention own = *all;
    own.query = (const char *)all->query + head * group * all->key_size * size;
    own.keys = (const char *)all->keys + head * all->key_size * size;
    own.values = (const char *)all->values + head * all->value_size * size;
    own.output = output + head * group * all->value_size * size;
    own.sinks = all->sinks ? sinks_of(shared) + head * group : NULL;
    own.slots = paths_of(shared);
    own.num_heads = group;
    own.num_kv_heads = 1;
    specdec_attend(&own, rows_of(shared) + first, texts_of(shared)[text + 1] - first, (float *)room);
}

static void attend_part(const void *task, int64_t part, char *output, char *room)
{
    const Shared *shared = task;
    for (int64_t number = first_head_of(shared, part); number < first_head_of(shared, part + 1); number++)
        attend_head(shared, number, output, room);
}

static void copy_part(const void *task, int64_t part, const char *from, char *to)
{
    const Shared *shared = task;
    const Attention *all = &shared->all;
    const int64_t num_bytes = all->num_heads / all->num_kv_heads * all->value_size * (all->is_bf16 ? 2 : 4);
    for (int64_t number = first_head_of(shared, part); number < first_head_of(shared, part + 1); number++) {
        const int64_t text = number / all->num_kv_heads, head = number % all->num_kv_heads;
        for (int64_t row = texts_of(shared)[text]; row < texts_of(shared)[text + 1]; row++) {
            const int64_t token = rows_of(shared)[row].token * all->output_heads * all->value_size * (all->is_bf16 ? 2 : 4);
            const int64_t place = token + head * num_bytes;
            memcpy(to + place, from + place, (size_t)num_bytes);
        }
    }
}

// Return how many times as many keys as the mean text the one with the most reads, row by row.
static int64_t unevenness_of(const Shared *shared)
{
    int64_t total = 1, most = 1;
    for (int64_t text = 0; text < shared->num_texts; text++) {
        const int64_t first = texts_of(shared)[text], count = texts_of(shared)[text + 1] - first;
        const int64_t num_keys = rows_of(shared)[first].end * count;
        total += num_keys;
        most = num_keys > most ? num_keys : most;
    }
    return 1 + most * shared->num_texts / total;
}

// Return how many bytes of keys and values some rows read, a text's once.
static int64_t bytes_read(const Attention *all, const Row *rows, int64_t num_rows)
{
    int64_t num_slots = 0;
    for (int64_t index = 0; index < num_rows; index += num_of_one_text(rows + index, num_rows - index))
        num_slots += rows[index].end - first_seen(all, rows + index);
    return num_slots * all->num_kv_heads * (all->key_size + all->value_size) * (all->is_bf16 ? 2 : 4);
}

// As specdec_attend, with the help of others. The rows' paths have num_paths slots in all; keys and values stay where they are
// until specdec_rest.
void specdec_attend_shared(const Attention *all, const Row *rows, int64_t num_rows, int64_t num_paths, float *room)
{
    const int64_t size = all->is_bf16 ? 2 : 4, token_bytes = all->num_heads * all->key_size * size;
    int64_t num_tokens = 0;
    for (int64_t index = 0; index < num_rows; index++)
        num_tokens = rows[index].token < num_tokens ? num_tokens : rows[index].token + 1;
    const int64_t output_bytes = num_tokens * all->output_heads * all->value_size * size;
    const int64_t query_bytes = WHOLE_LINES(num_tokens * token_bytes);
    Shared task = {*all, num_rows, 0, num_paths, 1};
    for (int64_t index = 0; index < num_rows; index += num_of_one_text(rows + index, num_rows - index))
        task.num_texts++;
    const int64_t num_numbers = task.num_texts + 1 + num_paths, num_heads = task.num_texts * all->num_kv_heads;
    const int64_t task_bytes = (int64_t)sizeof task + num_rows * (int64_t)sizeof *rows + num_numbers * (int64_t)sizeof(int64_t)
                               + all->num_heads * (int64_t)sizeof(float);
    char *shared = NULL;
    if (num_heads > 1 && task_bytes <= MAX_TASK_BYTES && bytes_read(all, rows, num_rows) >= MIN_SHARED_BYTES)
        shared = specdec_room_to_share(query_bytes + task_bytes, output_bytes, specdec_room(all));
    if (!shared)
        return specdec_attend(all, rows, num_rows, room);
    for (int64_t token = 0; token < num_tokens; token++)
        memcpy(shared + token * token_bytes, (const char *)all->query + token * all->query_stride * size, (size_t)token_bytes);
    task.all.query = shared;
    task.all.query_stride = all->num_heads * all->key_size;
    task.num_parts = num_heads < MAX_PARTS ? num_heads : MAX_PARTS;
    Shared *whole = (Shared *)(shared + query_bytes);
    *whole = task;
    memcpy(rows_of(whole), rows, (size_t)num_rows * sizeof *rows);
    int64_t *first = texts_of(whole);
    for (int64_t index = 0; index < num_rows; index += num_of_one_text(rows + index, num_rows - index))
        *first++ = index;
    *first = num_rows;
    memcpy(paths_of(whole), all->slots, (size_t)num_paths * sizeof(int64_t));
    if (all->sinks)
        memcpy(sinks_of(whole), all->sinks, (size_t)all->num_heads * sizeof(float));
    specdec_share(&(Job){attend_part, copy_part, whole, all->output, (char *)room, task_bytes, output_bytes, task.num_parts,
                        unevenness_of(whole)});
}

// Copy the new tokens' keys or values to their slots, `num_bytes` each; tokens lie `stride` bytes apart.
void specdec_store(char *slots, const char *tokens, int64_t stride, const int64_t *places, int64_t count, int64_t num_bytes)
{
    for (int64_t index = 0; index < count; index++)
        memcpy(slots + places[index] * num_bytes, tokens + index * stride, (size_t)num_bytes);
}
