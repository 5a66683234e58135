// A Llama's forward in one call: between its products lies so little arithmetic that calling it step by step takes longer.
//
// Sums are float32, of a row in an order of its own; what lies between two products is rounded to the model's type where
// transformers keeps it. So a token's bits depend on its own text alone, whatever else is in the call.

#include "kernels.h"

// A root mean square norm (Zhang and Sennrich 2019).
typedef struct {
    const float *weight;  // or NULL: none
    float eps;
} Norm;

typedef struct {
    Weight to_heads, from_heads, to_mlp, from_mlp;  // to_heads: query, key, value; to_mlp: gate, up
    Norm attention_norm, mlp_norm;
    Norm head_norm;      // its weight: [heads + kv_heads, head_size]
    char *keys, *values; // [slots, kv_heads, head_size]
    int64_t window;      // as Attention's
} Layer;

typedef struct {
    const char *embeddings;  // [vocabulary, width]
    const Layer *layers;
    Norm norm;
    Weight head;
    int64_t num_layers, width, head_size, num_heads, num_kv_heads;
    float scaling;  // of attention's scores
    int64_t is_bf16, lanes, has_tiles;
} Model;

// Tokens in a row whose keys and values have a place of their own.
typedef struct {
    char *keys, *values;  // as a Layer's
    int64_t first, count;
} Group;

// How a head of one layer reads pairs: a token's embedding, under the layer's attention_norm, beside a state.
typedef struct {
    Norm state_norm;
    int64_t adds_to_normalised;  // the layer adds to the normalised states, else to the states
    const char *states;          // [num_tokens, width]
    char *outputs;               // [num_tokens, width], the layer's
} Pairs;

// The new tokens of all sequences, and what is wanted of them.
typedef struct {
    const int64_t *tokens, *positions, *slots;  // [num_tokens]; slots: where keys and values go
    const void *angles;                         // [positions, cosine and signed sine, head_size]
    const Row *rows;                            // [num_tokens]: what each sees
    const int64_t *paths;                       // as Attention's slots
    const int64_t *logit_rows, *observed_rows, *hidden_layers;  // hidden_layers ascend
    int64_t num_tokens, num_paths, num_logit_rows, num_observed, num_hidden_layers;
    void *logits;                               // [num_logit_rows, vocabulary]
    char *states;                               // [num_observed, num_hidden_layers, width]
} Forward;

// Room for what lies between products.
typedef struct {
    char *hidden, *rows;   // [num_tokens, width]
    char *wide, *narrow;   // to_heads' and to_mlp's outputs; from_heads' and from_mlp's inputs
    char *products;        // specdec_multiply's
    float *attention;
} Room;

static int64_t larger_of(int64_t one, int64_t other)
{
    return one > other ? one : other;
}

static Attention attention_of(const Model *model, const Layer *layer)
{
    return (Attention){.keys = layer->keys,
                       .values = layer->values,
                       .query_stride = (model->num_heads + 2 * model->num_kv_heads) * model->head_size,
                       .slot_heads = model->num_kv_heads,
                       .output_heads = model->num_heads,
                       .num_heads = model->num_heads,
                       .num_kv_heads = model->num_kv_heads,
                       .key_size = model->head_size,
                       .value_size = model->head_size,
                       .window = layer->window,
                       .scaling = model->scaling,
                       .is_bf16 = model->is_bf16,
                       .lanes = model->lanes,
                       .has_tiles = model->has_tiles};
}

// Divide a piece of memory, and return how many bytes of it are needed; NULL: none of it is there yet.
static int64_t divide(const Model *model, int64_t num_tokens, char *memory, Room *room)
{
    const int64_t size = model->is_bf16 ? 2 : 4;
    const Attention attention = attention_of(model, model->layers);
    int64_t wide = 0, narrow = 0, products = specdec_product_room(&model->head, num_tokens);
    for (int64_t number = 0; number < model->num_layers; number++) {
        const Layer *layer = model->layers + number;
        wide = larger_of(wide, larger_of(layer->to_heads.num_out, layer->to_mlp.num_out));
        narrow = larger_of(narrow, larger_of(layer->from_heads.num_in, layer->from_mlp.num_in));
        narrow = larger_of(narrow, layer->to_heads.num_in);
        const Weight *weights[4] = {&layer->to_heads, &layer->from_heads, &layer->to_mlp, &layer->from_mlp};
        for (int index = 0; index < 4; index++)
            products = larger_of(products, specdec_product_room(weights[index], num_tokens));
    }
    const int64_t row = num_tokens * size;
    const int64_t sizes[5] = {row * model->width, row * model->width, row * wide, row * narrow, products};
    char **parts[5] = {&room->hidden, &room->rows, &room->wide, &room->narrow, &room->products};
    int64_t num_bytes = 0;
    for (int part = 0; part < 5; part++) {
        *parts[part] = (char *)((uintptr_t)memory + (uintptr_t)num_bytes);
        num_bytes += (sizes[part] + 63) / 64 * 64;
    }
    room->attention = (float *)((uintptr_t)memory + (uintptr_t)num_bytes);
    return num_bytes + specdec_room(&attention);
}

// Store the new keys and values of a group of tokens, and attend: from `wide` to `narrow`. Helpers may read keys and values that
// lie in the layer's own place alone, which stays.
static void attend(const Model *model, const Layer *layer, const Forward *forward, const Group *group, const Room *room)
{
    const int64_t size = model->is_bf16 ? 2 : 4, num_bytes = model->num_kv_heads * model->head_size * size;
    Attention attention = attention_of(model, layer);
    const int64_t stride = attention.query_stride * size, *slots = forward->slots + group->first;
    const char *keys = room->wide + model->num_heads * model->head_size * size + group->first * stride;
    specdec_store(group->keys, keys, stride, slots, group->count, num_bytes);
    specdec_store(group->values, keys + num_bytes, stride, slots, group->count, num_bytes);
    attention.keys = group->keys;
    attention.values = group->values;
    attention.query = room->wide;
    attention.output = room->narrow;
    attention.slots = forward->paths;
    if (layer->keys && group->keys == layer->keys)
        specdec_attend_shared(&attention, forward->rows, group->count, forward->num_paths, room->attention);
    else
        specdec_attend(&attention, forward->rows + group->first, group->count, room->attention);
}

// Copy the observed rows if the next hidden state that is wanted is that before layer `number`; return how many it was.
static int64_t observe(const Forward *forward, int64_t number, int64_t num_seen, const char *hidden, int64_t num_bytes)
{
    if (num_seen == forward->num_hidden_layers || forward->hidden_layers[num_seen] != number)
        return 0;
    for (int64_t index = 0; index < forward->num_observed; index++)
        memcpy(forward->states + (index * forward->num_hidden_layers + num_seen) * num_bytes,
               hidden + forward->observed_rows[index] * num_bytes, (size_t)num_bytes);
    return 1;
}

#ifdef HAS_VERSIONS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define LANES 16
#define NAME(x) x##_16
#include "layers_lanes.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define NAME(x) x##_8
#include "layers_lanes.h"
#pragma GCC pop_options
#endif

// Return how many bytes of memory a forward of so many tokens needs.
int64_t specdec_forward_room(const Model *model, int64_t num_tokens)
{
    Room room;
    return divide(model, num_tokens, NULL, &room);
}

// Run a model whose weights `specdec_multiply` reads; `memory` has specdec_forward_room bytes.
void specdec_forward(const Model *model, const Forward *forward, char *memory)
{
    Room room;
    divide(model, forward->num_tokens, memory, &room);
#ifdef HAS_VERSIONS
    if (model->lanes == 16)
        forward_16(model, forward, &room);
    else
        forward_8(model, forward, &room);
#endif
}

// Run a head of one layer over pairs of several texts, each a group; `memory` as for a forward of so many tokens.
void specdec_pairs(const Model *model, const Pairs *pairs, const Forward *forward, const Group *groups, int64_t num_groups,
                   char *memory)
{
    Room room;
    divide(model, forward->num_tokens, memory, &room);
#ifdef HAS_VERSIONS
    if (model->lanes == 16)
        pairs_16(model, pairs, forward, groups, num_groups, &room);
    else
        pairs_8(model, pairs, forward, groups, num_groups, &room);
#endif
}
