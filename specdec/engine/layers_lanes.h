// A forward for one width of vectors: included by layers_kernel.c once for each, with LANES and NAME(x) defined.

#include "lanes.h"

static ALWAYS_INLINE void NAME(save)(void *numbers, int64_t first, FLOATS floats, int64_t count, const int is_bf16)
{
    if (count >= LANES)
        NAME(write)(numbers, first, floats, LANES, is_bf16);
    else
        NAME(write)(numbers, first, floats, (int)count, is_bf16);
}

// Divide `size` numbers, from `first` on, by their root mean square, and multiply them with the norm's weight.
static ALWAYS_INLINE void NAME(normalise)(const Norm *norm, const float *weight, const void *from, int64_t first, void *to,
                                          int64_t target, int64_t size, const int is_bf16)
{
    FLOATS squares = {0};
    for (int64_t index = 0; index < size; index += LANES) {
        const FLOATS floats = NAME(load)(from, first + index, size - index, is_bf16);
        squares += floats * floats;
    }
    const float scale = 1 / sqrtf(NAME(sum_of)(squares) / (float)size + norm->eps);
    for (int64_t index = 0; index < size; index += LANES) {
        const FLOATS floats = NAME(load)(from, first + index, size - index, is_bf16) * scale;
        NAME(save)(to, target + index, floats * NAME(load)(weight, index, size - index, 0), size - index, is_bf16);
    }
}

static ALWAYS_INLINE void NAME(normalise_rows)(const Norm *norm, const void *from, void *to, int64_t count, int64_t width,
                                               const int is_bf16)
{
    for (int64_t row = 0; row < count; row++)
        NAME(normalise)(norm, norm->weight, from, row * width, to, row * width, width, is_bf16);
}

// Turn a head by its position's angles: x * cosine + (x with its halves exchanged) * signed sine (Su et al. 2021).
static ALWAYS_INLINE void NAME(turn)(void *numbers, int64_t first, const void *angles, int64_t angle, int64_t size,
                                     const int is_bf16)
{
    const int64_t half = size / 2, second = first + half, sine = angle + size;
    for (int64_t index = 0; index < half; index += LANES) {
        const int64_t count = half - index;
        const FLOATS low = NAME(load)(numbers, first + index, count, is_bf16);
        const FLOATS high = NAME(load)(numbers, second + index, count, is_bf16);
        FLOATS new_low = low * NAME(load)(angles, angle + index, count, is_bf16);
        FLOATS new_high = high * NAME(load)(angles, angle + half + index, count, is_bf16);
        __asm__("" : "+v"(new_low), "+v"(new_high));  // rounded: else the compiler chooses which product is one with the sum
        new_low += high * NAME(load)(angles, sine + index, count, is_bf16);
        new_high += low * NAME(load)(angles, sine + half + index, count, is_bf16);
        NAME(save)(numbers, first + index, new_low, count, is_bf16);
        NAME(save)(numbers, second + index, new_high, count, is_bf16);
    }
}

// Normalise queries and keys where the model does, and turn them: heads [tokens, heads + 2 * kv_heads, head_size].
static ALWAYS_INLINE void NAME(turn_heads)(const Model *model, const Layer *layer, const Forward *forward, void *heads,
                                           const int is_bf16)
{
    const int64_t num_turned = model->num_heads + model->num_kv_heads, size = model->head_size;
    const int64_t stride = (num_turned + model->num_kv_heads) * size;
    for (int64_t token = 0; token < forward->num_tokens; token++)
        for (int64_t head = 0; head < num_turned; head++) {
            const int64_t first = token * stride + head * size;
            if (layer->head_norm.weight)
                NAME(normalise)(&layer->head_norm, layer->head_norm.weight + head * size, heads, first, heads, first, size,
                                is_bf16);
            NAME(turn)(heads, first, forward->angles, forward->positions[token] * 2 * size, size, is_bf16);
        }
}

// Add rows to those that go from layer to layer.
static ALWAYS_INLINE void NAME(add)(void *hidden, const void *added, int64_t count, const int is_bf16)
{
    for (int64_t index = 0; index < count; index += LANES) {
        const FLOATS sums = NAME(load)(hidden, index, count - index, is_bf16) + NAME(load)(added, index, count - index, is_bf16);
        NAME(save)(hidden, index, sums, count - index, is_bf16);
    }
}

// Return x / (1 + e^-x), by a power that is at most 1 (Elfwing et al. 2017, SiLU).
static ALWAYS_INLINE FLOATS NAME(silu)(FLOATS x)
{
    const INTS is_negative = x < (FLOATS){0};
    const FLOATS power = NAME(exponential)((FLOATS)((is_negative & (INTS)x) | (~is_negative & (INTS)-x)));
    return (FLOATS)((is_negative & (INTS)(x * power)) | (~is_negative & (INTS)x)) / (power + 1.0f);
}

// Gate the MLP's inner numbers: [rows, gate and up, inner] to [rows, inner].
static ALWAYS_INLINE void NAME(gate)(const void *both, void *gated, int64_t num_rows, int64_t inner, const int is_bf16)
{
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t index = 0; index < inner; index += LANES) {
            const FLOATS gates = NAME(load)(both, 2 * row * inner + index, inner - index, is_bf16);
            const FLOATS ups = NAME(load)(both, (2 * row + 1) * inner + index, inner - index, is_bf16);
            NAME(save)(gated, row * inner + index, NAME(silu)(gates) * ups, inner - index, is_bf16);
        }
}

// Add to `hidden` what a layer's attention gives, from its products in `wide` on, then what its MLP gives.
static ALWAYS_INLINE void NAME(finish_layer)(const Model *model, const Layer *layer, const Forward *forward,
                                             const Group *groups, int64_t num_groups, const Room *room, const int is_bf16)
{
    const int64_t count = forward->num_tokens, width = model->width;
    NAME(turn_heads)(model, layer, forward, room->wide, is_bf16);
    for (int64_t group = 0; group < num_groups; group++)
        attend(model, layer, forward, groups + group, room);
    specdec_multiply(&layer->from_heads, room->narrow, room->rows, count, room->products);
    NAME(add)(room->hidden, room->rows, count * width, is_bf16);
    NAME(normalise_rows)(&layer->mlp_norm, room->hidden, room->rows, count, width, is_bf16);
    specdec_multiply(&layer->to_mlp, room->rows, room->wide, count, room->products);
    NAME(gate)(room->wide, room->narrow, count, layer->from_mlp.num_in, is_bf16);
    specdec_multiply(&layer->from_mlp, room->narrow, room->rows, count, room->products);
    NAME(add)(room->hidden, room->rows, count * width, is_bf16);
}

static ALWAYS_INLINE void NAME(run_layer)(const Model *model, const Layer *layer, const Forward *forward, const Room *room,
                                          const int is_bf16)
{
    const Group whole = {layer->keys, layer->values, 0, forward->num_tokens};
    NAME(normalise_rows)(&layer->attention_norm, room->hidden, room->rows, forward->num_tokens, model->width, is_bf16);
    specdec_multiply(&layer->to_heads, room->rows, room->wide, forward->num_tokens, room->products);
    NAME(finish_layer)(model, layer, forward, &whole, 1, room, is_bf16);
}

static ALWAYS_INLINE void NAME(run)(const Model *model, const Forward *forward, const Room *room, const int is_bf16)
{
    const int64_t width = model->width, num_bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t token = 0; token < forward->num_tokens; token++)
        memcpy(room->hidden + token * num_bytes, model->embeddings + forward->tokens[token] * num_bytes, (size_t)num_bytes);
    int64_t num_seen = 0;
    for (int64_t number = 0; number < model->num_layers; number++) {
        num_seen += observe(forward, number, num_seen, room->hidden, num_bytes);
        NAME(run_layer)(model, model->layers + number, forward, room, is_bf16);
    }
    if (num_seen < forward->num_hidden_layers) {
        NAME(normalise_rows)(&model->norm, room->hidden, room->rows, forward->num_tokens, width, is_bf16);
        observe(forward, model->num_layers, num_seen, room->rows, num_bytes);
    }
    for (int64_t index = 0; index < forward->num_logit_rows; index++)
        NAME(normalise)(&model->norm, model->norm.weight, room->hidden, forward->logit_rows[index] * width, room->rows,
                        index * width, width, is_bf16);
    specdec_multiply(&model->head, room->rows, forward->logits, forward->num_logit_rows, room->products);
}

static void NAME(forward)(const Model *model, const Forward *forward, const Room *room)
{
    if (model->is_bf16)
        NAME(run)(model, forward, room, 1);
    else
        NAME(run)(model, forward, room, 0);
}

static ALWAYS_INLINE void NAME(run_pairs)(const Model *model, const Pairs *pairs, const Forward *forward,
                                          const Group *groups, int64_t num_groups, const Room *room, const int is_bf16)
{
    const Layer *layer = model->layers;
    const int64_t count = forward->num_tokens, width = model->width, num_bytes = width * (is_bf16 ? 2 : 4);
    for (int64_t token = 0; token < count; token++) {
        const int64_t pair = 2 * token * width;
        NAME(normalise)(&layer->attention_norm, layer->attention_norm.weight, model->embeddings, forward->tokens[token] * width,
                        room->narrow, pair, width, is_bf16);
        NAME(normalise)(&pairs->state_norm, pairs->state_norm.weight, pairs->states, token * width, room->narrow, pair + width,
                        width, is_bf16);
        const char *kept = pairs->adds_to_normalised ? room->narrow + 2 * token * num_bytes + num_bytes
                                                     : pairs->states + token * num_bytes;
        memcpy(room->hidden + token * num_bytes, kept, (size_t)num_bytes);
    }
    specdec_multiply(&layer->to_heads, room->narrow, room->wide, count, room->products);
    NAME(finish_layer)(model, layer, forward, groups, num_groups, room, is_bf16);
    memcpy(pairs->outputs, room->hidden, (size_t)(count * num_bytes));
}

static void NAME(pairs)(const Model *model, const Pairs *pairs, const Forward *forward, const Group *groups,
                        int64_t num_groups, const Room *room)
{
    if (model->is_bf16)
        NAME(run_pairs)(model, pairs, forward, groups, num_groups, room, 1);
    else
        NAME(run_pairs)(model, pairs, forward, groups, num_groups, room, 0);
}

#undef FLOATS
#undef INTS
#undef LANES
#undef NAME
