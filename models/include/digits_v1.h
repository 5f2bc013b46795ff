/*
 * digits_v1.h: the chunk format digits-v1: images of 28 x 28 grey pixels with a label from 0 to 9. It reads
 * them, keeps them by their ink, and draws them as the network sees them.
 *
 * In exactly one source file of the package:
 *
 *     #define DIGITS_V1_IMPLEMENTATION
 *     #include "digits_v1.h"
 *
 * All others include it without the define.
 */
#ifndef DIGITS_V1_H
#define DIGITS_V1_H

#include <stdint.h>

#include "covey_random.h"

#define ROWS 28
#define COLUMNS 28
#define PIXELS (ROWS * COLUMNS)
#define CLASSES 10
#define GREY (1.0f / 255.0f) /* what a pixel's byte is multiplied by */

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

/* How far an image is moved: modulo 2^32, so that what leaves the frame up or left is outside too. */
typedef struct {
    uint32_t down, right;
} displacement;

/* Up to `shift` pixels both ways: a pure function of (key, image). */
static inline displacement chunk_displacement(uint64_t key, uint32_t image, uint32_t shift) {
    if (!shift) return (displacement){0, 0};
    return (displacement){
        covey_random_below(key, 2ull * image, 2 * shift + 1) - shift,
        covey_random_below(key, 2ull * image + 1, 2 * shift + 1) - shift,
    };
}

/* Draws an image, moved, on a blank sheet of `stride` floats a row: ink from 0 to 1. */
static inline void chunk_draw(const chunk *from, uint32_t image, displacement by, float *sheet,
                              uint32_t stride) {
    uint32_t last = from->starts[image + 1];
    for (uint32_t i = from->starts[image]; i < last; i++) {
        uint32_t y = (from->ink[i] >> 16) + by.down, x = (from->ink[i] >> 8 & 255) + by.right;
        if (y >= ROWS || x >= COLUMNS) continue;
        sheet[y * stride + x] = (float)(from->ink[i] & 255) * GREY;
    }
}

#endif

#if defined(DIGITS_V1_IMPLEMENTATION) && !defined(DIGITS_V1_IMPLEMENTED)
#define DIGITS_V1_IMPLEMENTED

/* Every byte may be hostile: all is checked before anything is stored. */

#include "covey_support.h"

static uint32_t read_u32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static int32_t check_header(const uint8_t *bytes, uint32_t length) {
    if (length < CHUNK_HEADER_BYTES) {
        return covey_fail(COVEY_BAD_DATA, "a digits-v1 header has %u bytes, this chunk has %u in all",
                          CHUNK_HEADER_BYTES, length);
    }
    if (bytes[0] != 'D' || bytes[1] != 'I' || bytes[2] != 'G' || bytes[3] != 'S') {
        return covey_fail(COVEY_BAD_DATA, "not a digits-v1 chunk: it doesn't begin with DIGS");
    }
    uint32_t version = read_u32(bytes + 4), rows = read_u32(bytes + 8), columns = read_u32(bytes + 12);
    uint32_t count = read_u32(bytes + 16);
    if (version != 1) return covey_fail(COVEY_BAD_DATA, "chunk version %u, expected 1", version);
    if (rows != ROWS || columns != COLUMNS) {
        return covey_fail(COVEY_BAD_DATA, "images of %u x %u pixels, expected 28 x 28", rows, columns);
    }
    if (count > (length - CHUNK_HEADER_BYTES) / IMAGE_LEAST_BYTES) {
        return covey_fail(COVEY_BAD_DATA, "the header announces %u images, more than %u bytes can hold",
                          count, length - CHUNK_HEADER_BYTES);
    }
    return COVEY_OK;
}

/*
 * Reads image `number` at bytes[*at], moves *at behind it and adds its inked pixels to *inked; writes
 * them to `ink` unless that is null. Leaves *at within `length` whatever happens.
 */
static int32_t read_image(const uint8_t *bytes, uint32_t length, uint32_t number, uint32_t *at,
                          uint32_t *inked, uint32_t *ink) {
    uint32_t position = *at, found = *inked, pixel = 0;
    if (position >= length) {
        return covey_fail(COVEY_BAD_DATA, "image %u: the chunk ends before it", number);
    }
    uint32_t label = bytes[position++];
    if (label >= CLASSES) {
        return covey_fail(COVEY_BAD_DATA, "image %u: label %u, expected 0 to 9", number, label);
    }
    while (pixel < PIXELS) {
        if (position >= length) {
            return covey_fail(COVEY_BAD_DATA, "image %u: the chunk ends after %u of %u pixels", number, pixel,
                              PIXELS);
        }
        uint32_t code = bytes[position++];
        uint32_t run = code < 128 ? code + 1 : code - 127;
        if (run > PIXELS - pixel) {
            return covey_fail(COVEY_BAD_DATA, "image %u: a run of %u pixels at pixel %u crosses its end",
                              number, run, pixel);
        }
        if (code >= 128) {
            if (run > length - position) {
                return covey_fail(COVEY_BAD_DATA, "image %u: the chunk ends within a run of %u pixels",
                                  number, run);
            }
            for (uint32_t i = 0; i < run; i++) {
                uint32_t value = bytes[position + i];
                if (value == 0) continue;
                if (ink) ink[found] = (pixel + i) / COLUMNS << 16 | (pixel + i) % COLUMNS << 8 | value;
                found++;
            }
            position += run;
        }
        pixel += run;
    }
    *at = position;
    *inked = found;
    return COVEY_OK;
}

/* Checks every image, counts the ink, and that nothing follows the last one. */
static int32_t check_images(const uint8_t *bytes, uint32_t length, uint32_t count, uint32_t *inked) {
    uint32_t at = CHUNK_HEADER_BYTES;
    *inked = 0;
    for (uint32_t i = 0; i < count; i++) {
        int32_t status = read_image(bytes, length, i, &at, inked, 0);
        if (status < 0) return status;
    }
    if (at != length) {
        return covey_fail(COVEY_BAD_DATA, "%u bytes follow the last of %u images", length - at, count);
    }
    return COVEY_OK;
}

int32_t chunk_decode(chunk *into, const uint8_t *bytes, uint32_t length) {
    int32_t status = check_header(bytes, length);
    if (status < 0) return status;
    uint32_t count = read_u32(bytes + 16), inked;
    status = check_images(bytes, length, count, &inked);
    if (status < 0) return status;

    uint64_t words = (uint64_t)count + 1 + inked;
    uint64_t needed = words * sizeof(uint32_t) + count;
    uint32_t *block = needed <= UINT32_MAX ? covey_alloc((uint32_t)needed) : 0;
    if (!block) {
        return covey_fail(COVEY_NO_MEMORY, "no memory for %u images with %u inked pixels", count, inked);
    }
    uint32_t *starts = block, *ink = block + count + 1;
    uint8_t *labels = (uint8_t *)(block + words);
    uint32_t at = CHUNK_HEADER_BYTES, found = 0;
    for (uint32_t i = 0; i < count; i++) {
        starts[i] = found;
        labels[i] = bytes[at];
        read_image(bytes, length, i, &at, &found, ink);
    }
    starts[count] = found;
    *into = (chunk){count, starts, ink, labels, block, (uint32_t)needed};
    return (int32_t)count;
}

void chunk_clear(chunk *it) {
    covey_free(it->block, it->block_bytes);
    *it = (chunk){0};
}

#endif
