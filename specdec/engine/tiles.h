// The processor's matrix unit (Intel AMX): eight tiles of 16 rows of 64 bytes.

#define TILE_ROWS 16
#define TILE_BYTES 64  // of a row, in one tile
#define FIRST_WEIGHTS 6

// What a processor's thread is told of its tiles.
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

// Let memory have all that was written so far: GCC does not know that the unit's instructions read more of it than a pointer.
static ALWAYS_INLINE void written(const void *memory)
{
    __asm__ volatile("" : : "r"(memory) : "memory");
}

// Let tiles 0 to 5 have so many rows, and the last two TILE_ROWS; until _tile_release.
static void set_tiles(int64_t num_rows)
{
    TileConfig config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = TILE_BYTES;
        config.rows[tile] = (uint8_t)(tile < FIRST_WEIGHTS ? num_rows : TILE_ROWS);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config) : "memory");  // GCC's own tells it of the first 8 bytes alone
}
