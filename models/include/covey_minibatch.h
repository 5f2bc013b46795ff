/*
 * covey_minibatch.h: the way of a dataset package through its units, a minibatch at a time, for TRAIN and
 * EVALUATE and for the streams that feed a GPU. One such way per module: include it in one source file.
 *
 *     begin       minibatches_begin(&way, phase, first, units, loaded, &config)
 *     each step   uint32_t count = minibatches_next(&way, most);  0: finished
 *                 ... way.which[0 .. count) are the units, way.epoch the local epoch ...
 *                 return minibatches_left(&way);
 *     anything that ends the phase   minibatches_end(&way)
 */
#ifndef COVEY_MINIBATCH_H
#define COVEY_MINIBATCH_H

#include "covey.h"
#include "covey_random.h"
#include "covey_support.h"

/* Random streams of a seed, two for each local epoch: its order, and what a package moves by chance. */
#define COVEY_STREAM_SHUFFLE 16u
#define COVEY_STREAM_AUGMENT 17u

typedef struct {
    int32_t phase;         /* 0: none */
    uint32_t *order;       /* [units] the units of this epoch, in order */
    const uint32_t *which; /* the current minibatch, within `order` */
    uint32_t first, units;
    uint32_t position; /* units of this epoch that minibatches_next handed out */
    uint32_t epoch, epochs;
    int64_t seed;
} minibatches;

/* Whether the phase goes through its units as training does: shuffled, local_epochs times, augmented. */
static inline int minibatches_training(const minibatches *way) {
    return way->phase == COVEY_TRAIN || way->phase == COVEY_STREAM_TRAIN;
}

/* Whether the phase hands out tensors instead of computing. */
static inline int minibatches_streaming(const minibatches *way) {
    return way->phase == COVEY_STREAM_TRAIN || way->phase == COVEY_STREAM_EVALUATE;
}

/* The key of what a package moves by chance in this epoch. */
static inline uint64_t minibatches_augment_key(const minibatches *way) {
    return covey_random_key(way->seed, COVEY_STREAM_AUGMENT + 2 * way->epoch);
}

static void minibatches_end(minibatches *way) {
    if (way->order) covey_free(way->order, way->units * (uint32_t)sizeof *way->order);
    *way = (minibatches){0};
}

/* The order of one epoch's units: Fisher and Yates's shuffle in training, as they lie in evaluation. */
static void minibatches_order(minibatches *way) {
    for (uint32_t i = 0; i < way->units; i++) way->order[i] = way->first + i;
    if (!minibatches_training(way)) return;
    uint64_t key = covey_random_key(way->seed, COVEY_STREAM_SHUFFLE + 2 * way->epoch);
    for (uint32_t i = way->units; i > 1; i--) {
        uint32_t j = covey_random_below(key, i, i), kept = way->order[i - 1];
        way->order[i - 1] = way->order[j];
        way->order[j] = kept;
    }
}

/* Checks what covey_begin was asked for against the `loaded` units, and starts. */
static int32_t minibatches_begin(minibatches *way, int32_t phase, int64_t first, int32_t units,
                                 uint32_t loaded, const covey_config *config) {
    minibatches_end(way);
    if (first < 0 || units < 0 || first > loaded || (uint32_t)units > loaded - (uint32_t)first) {
        return covey_fail(COVEY_BAD_ARGUMENT, "the units asked for aren't within the %u that are loaded",
                          loaded);
    }
    uint32_t *order = covey_alloc((uint32_t)units * (uint32_t)sizeof *order);
    if (!order) return covey_fail(COVEY_NO_MEMORY, "no memory for the order of %u units", (uint32_t)units);
    *way = (minibatches){
        .phase = phase,
        .order = order,
        .which = order,
        .first = (uint32_t)first,
        .units = (uint32_t)units,
        .epochs = 1,
        .seed = config->seed,
    };
    if (minibatches_training(way)) way->epochs = config->local_epochs;
    minibatches_order(way);
    return COVEY_OK;
}

/* Units of work left: each counts once in each epoch. */
static int32_t minibatches_left(const minibatches *way) {
    uint64_t left = (uint64_t)(way->epochs - way->epoch) * way->units - way->position;
    return left > INT32_MAX ? INT32_MAX : (int32_t)left;
}

/* Moves on to the next minibatch, of at most `most` units, and returns how many it has; 0 at the end. */
static uint32_t minibatches_next(minibatches *way, uint32_t most) {
    if (minibatches_left(way) == 0) return 0;
    if (way->position == way->units) {
        way->epoch++;
        way->position = 0;
        minibatches_order(way);
    }
    uint32_t count = way->units - way->position < most ? way->units - way->position : most;
    way->which = way->order + way->position;
    way->position += count;
    return count;
}

#endif
