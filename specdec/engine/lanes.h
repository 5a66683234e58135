// Vectors of LANES floats, and what is done with them: included once for each width, with LANES and NAME(x) defined.

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(halves) __attribute__((vector_size(2 * LANES)));
#define FLOATS NAME(floats)
#define INTS NAME(ints)

static ALWAYS_INLINE NAME(words) NAME(widened)(NAME(halves) halves)
{
#if LANES == 16
    return (NAME(words))_mm512_cvtepu16_epi32((__m256i)halves);  // what GCC makes of the line below takes three steps
#else
    return __builtin_convertvector(halves, NAME(words));
#endif
}

// Return LANES numbers as floats; a bfloat16 is the upper half of a float.
static ALWAYS_INLINE FLOATS NAME(whole)(const void *numbers, const int is_bf16)
{
    FLOATS floats;  // not by way of an array: GCC fills that in two steps, and what reads it in one has to wait
    if (is_bf16) {
        NAME(halves) halves;
        memcpy(&halves, numbers, sizeof halves);
        floats = (FLOATS)(NAME(widened)(halves) << 16);
    } else
        memcpy(&floats, numbers, sizeof floats);
    return floats;
}

// Copy numbers as floats, and zeros up to a multiple of LANES.
static ALWAYS_INLINE void NAME(copy)(float *copied, const void *numbers, int64_t first, int count, const int is_bf16)
{
    const char *from = (const char *)numbers + first * (is_bf16 ? 2 : 4);
    int done = 0;
    for (; done + LANES <= count; done += LANES) {
        const FLOATS floats = NAME(whole)(from + done * (is_bf16 ? 2 : 4), is_bf16);
        memcpy(copied + done, &floats, sizeof floats);
    }
    if (done < count) {
        char rest[4 * LANES] = {0};
        for (int byte = 0; byte < (count - done) * (is_bf16 ? 2 : 4); byte++)
            rest[byte] = from[done * (is_bf16 ? 2 : 4) + byte];
        const FLOATS floats = NAME(whole)(rest, is_bf16);
        memcpy(copied + done, &floats, sizeof floats);
    }
}

static ALWAYS_INLINE FLOATS NAME(at)(const float *numbers, int chunk)
{
    FLOATS floats;
    memcpy(&floats, numbers + chunk * LANES, sizeof floats);
    return floats;
}

// e^x to 2 units in the last place, for x from -86 to 0; less is -86, NaN stays NaN (polynomial: Moshier, Cephes, expf).
static ALWAYS_INLINE FLOATS NAME(exponential)(FLOATS x)
{
    const FLOATS least = {0}, rounder = {0};
    const INTS is_less = x < least - 86.0f;
    x = (FLOATS)((is_less & (INTS)(least - 86.0f)) | (~is_less & (INTS)x));
    const FLOATS shifted = x * 1.44269504088896341f + (rounder + 12582912.0f);
    const INTS power = (INTS)shifted - (INTS)(rounder + 12582912.0f);
    const FLOATS rounded = shifted - 12582912.0f;
    const FLOATS rest = x - rounded * 0.693359375f - rounded * -2.12194440e-4f;
    FLOATS sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (FLOATS)((power + 127) << 23);
}

#if LANES == 16
#define TURNED(v, by) SHUFFLE(v, v, by, 1 + by, 2 + by, 3 + by, 4 + by, 5 + by, 6 + by, 7 + by, 8 + by, 9 + by, 10 + by, \
                              11 + by, 12 + by, 13 + by, 14 + by, 15 + by)
#elif LANES == 8
#define TURNED(v, by) SHUFFLE(v, v, by, 1 + by, 2 + by, 3 + by, 4 + by, 5 + by, 6 + by, 7 + by)
#else
#define TURNED(v, by) SHUFFLE(v, v, by, 1 + by, 2 + by, 3 + by)
#endif

static ALWAYS_INLINE FLOATS NAME(larger)(FLOATS first, FLOATS second)
{
    const INTS is_larger = second > first;
    return (FLOATS)((is_larger & (INTS)second) | (~is_larger & (INTS)first));
}

static ALWAYS_INLINE float NAME(largest_of)(FLOATS floats)
{
#if LANES == 16
    floats = NAME(larger)(floats, TURNED(floats, 8));
#endif
#if LANES >= 8
    floats = NAME(larger)(floats, TURNED(floats, 4));
#endif
    floats = NAME(larger)(floats, TURNED(floats, 2));
    return NAME(larger)(floats, TURNED(floats, 1))[0];
}

static ALWAYS_INLINE float NAME(sum_of)(FLOATS floats)
{
#if LANES == 16
    floats += TURNED(floats, 8);
#endif
#if LANES >= 8
    floats += TURNED(floats, 4);
#endif
    floats += TURNED(floats, 2);
    return (floats + TURNED(floats, 1))[0];
}
#undef TURNED

// Write some of a vector's numbers, the first ones.
static ALWAYS_INLINE void NAME(write)(void *output, int64_t first, FLOATS numbers, int count, const int is_bf16)
{
    if (!is_bf16) {
        memcpy((float *)output + first, &numbers, sizeof(float) * (size_t)count);
        return;
    }
    const NAME(words) words = (NAME(words))numbers, is_nan = (NAME(words))(numbers != numbers);
    const NAME(words) rounded = words + 0x7fffu + (words >> 16 & 1);  // must not make a NaN infinite
    const NAME(halves) halves =
        __builtin_convertvector(((is_nan & (words | 1u << 16)) | (~is_nan & rounded)) >> 16, NAME(halves));
    memcpy((uint16_t *)output + first, &halves, 2 * (size_t)count);
}

// Return up to LANES of an array's numbers as floats, and zeros.
static ALWAYS_INLINE FLOATS NAME(load)(const void *numbers, int64_t first, int64_t count, const int is_bf16)
{
    if (count >= LANES)
        return NAME(whole)((const char *)numbers + first * (is_bf16 ? 2 : 4), is_bf16);
    float copied[LANES];
    NAME(copy)(copied, numbers, first, (int)count, is_bf16);
    return NAME(at)(copied, 0);
}
