/* chunk.h: the chunk format digits-v1 and what a loaded chunk looks like in memory. */
#ifndef DIGITS_CHUNK_H
#define DIGITS_CHUNK_H

#include <stdint.h>

#define ROWS 28
#define COLUMNS 28
#define PIXELS (ROWS * COLUMNS)
#define CLASSES 10

/*
 * digits-v1, all little-endian:
 *
 *     header   char[4] "DIGS"; u32 version (1); u32 rows (28); u32 columns (28); u32 count
 *     image    u8 label (0 to 9), then runs until rows * columns pixels are there
 *     run      u8 c < 128: c + 1 blank pixels (0)
 *              u8 c >= 128: c - 127 pixel bytes follow
 *
 * A run never crosses the end of its image, and the last image ends with the file.
 */
#define CHUNK_HEADER_BYTES 20u
/* A label and seven blank runs: no image is shorter. */
#define IMAGE_LEAST_BYTES (1u + (PIXELS + 127u) / 128u)

/*
 * Only the inked pixels are kept, as (row << 16 | column << 8 | value), in pixel order: four pixels out of
 * five are blank, and a blank one adds nothing to any sum of the first layer.
 */
typedef struct {
    uint32_t count;         /* images */
    const uint32_t *starts; /* [count + 1] where an image's ink begins in `ink` */
    const uint32_t *ink;
    const uint8_t *labels; /* [count] */
    void *block;           /* the one allocation behind them */
    uint32_t block_bytes;
} chunk;

/* Fills `into` (which must be empty) and returns the number of images, or a negative status. */
int32_t chunk_decode(chunk *into, const uint8_t *bytes, uint32_t length);

/* Frees what a chunk holds and makes it empty. */
void chunk_clear(chunk *it);

#endif
