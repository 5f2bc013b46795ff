/* chunk.c: reads digits-v1. Every byte may be hostile: all is checked before anything is stored. */
#include "chunk.h"

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
