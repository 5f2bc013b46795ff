/*
 * digits_package.h: a classifier of digits-v1 images as Covey sees it: state, checks, and one minibatch at a
 * time. It defines the exports; a package includes it in one source file, after its network.h and its bounds
 * BATCH_MOST, EPOCHS_MOST and EVALUATION_SLICE (the images that an evaluation takes at once).
 *
 * What network.h declares:
 *
 *     network             the weights, floats without gaps, in manifest order
 *     descent             {rate, momentum}
 *     workspace           what a minibatch needs; .scores has a row of SCORES floats for each image
 *     workspace_bytes     its memory for so many images
 *     workspace_place     lays it out in zeroed memory, aligned to 16
 *     network_initialize, network_gather, network_forward, network_softmax, network_descend,
 *     network_forward_image: see the network.h of `digits`
 */
#ifndef DIGITS_PACKAGE_H
#define DIGITS_PACKAGE_H

#include "covey.h"
#include "covey_minibatch.h"
#include "covey_support.h"
#include "digits_v1.h"

/* The model's own hyperparameters, in manifest order. */
enum { MOMENTUM, SHIFT, OWN_HYPERPARAMETERS };
#define SHIFT_MOST 8
/* The manifest's metrics: sum and count of each. */
enum { LOSS_SUM, LOSS_COUNT, ACCURACY_SUM, ACCURACY_COUNT, METRIC_VALUES };
/* The tensors that a GPU plan can have: images f32 [n][PIXELS], labels u32 [n]. */
enum { IMAGES, LABELS, TENSORS };

static network weights __attribute__((aligned(16)));
static network velocity __attribute__((aligned(16)));
static double metrics[METRIC_VALUES];

static covey_config config;
static double own[OWN_HYPERPARAMETERS];
static int configured;
static workspace work;
static void *work_block;
static uint32_t work_bytes;

static chunk data;
static int loaded;

static minibatches way;
static covey_span tensors[TENSORS];
static void *stream_block;
static uint32_t stream_bytes;

int32_t covey_abi(void) { return COVEY_ABI; }
float *covey_weights(void) { return (float *)&weights; }
const double *covey_metrics(void) { return metrics; }

static void end_phase(void) {
    minibatches_end(&way);
    covey_free(stream_block, stream_bytes);
    stream_block = 0;
    memset(tensors, 0, sizeof tensors);
}

/* ---- Configuration ------------------------------------------------------------------------- */

static int within(double value, double least, double most) { return value >= least && value <= most; }

static int32_t check_config(const covey_config *c, const double *values) {
    if (c->batch_size < 1 || c->batch_size > BATCH_MOST) {
        return covey_fail(COVEY_BAD_ARGUMENT, "batchSize is %u, expected 1 to %u", c->batch_size, BATCH_MOST);
    }
    if (c->local_epochs < 1 || c->local_epochs > EPOCHS_MOST) {
        return covey_fail(COVEY_BAD_ARGUMENT, "localEpochs is %u, expected 1 to %u", c->local_epochs,
                          EPOCHS_MOST);
    }
    if (!within(c->learning_rate, 1e-6, 10.0)) {
        return covey_fail(COVEY_BAD_ARGUMENT, "learningRate is out of bounds, expected 1e-6 to 10");
    }
    if (!within(values[MOMENTUM], 0.0, 0.999)) {
        return covey_fail(COVEY_BAD_ARGUMENT, "momentum is out of bounds, expected 0 to 0.999");
    }
    if (!within(values[SHIFT], 0, SHIFT_MOST) || values[SHIFT] != (double)(uint32_t)values[SHIFT]) {
        return covey_fail(COVEY_BAD_ARGUMENT, "shift is a whole number of pixels from 0 to %u", SHIFT_MOST);
    }
    return COVEY_OK;
}

/* Memory for batches of `batch` in training and EVALUATION_SLICE in evaluation. */
static int32_t make_workspace(uint32_t batch) {
    uint32_t examples = batch > EVALUATION_SLICE ? batch : EVALUATION_SLICE;
    covey_free(work_block, work_bytes);
    work_bytes = workspace_bytes(examples);
    work_block = covey_alloc(work_bytes);
    if (!work_block) {
        return covey_fail(COVEY_NO_MEMORY, "no memory for batches of %u (%u bytes)", batch, work_bytes);
    }
    memset(work_block, 0, work_bytes);
    workspace_place(&work, work_block, examples);
    return COVEY_OK;
}

int32_t covey_configure(const void *bytes, uint32_t length) {
    covey_config next;
    double values[OWN_HYPERPARAMETERS];
    end_phase();
    configured = 0;
    if (length < sizeof next) {
        return covey_fail(COVEY_BAD_ARGUMENT, "a configuration has at least %u bytes, this one has %u",
                          (uint32_t)sizeof next, length);
    }
    memcpy(&next, bytes, sizeof next);
    if (next.version != 1) {
        return covey_fail(COVEY_BAD_ARGUMENT, "configuration version %u, expected 1", next.version);
    }
    if (next.hyperparameter_count != OWN_HYPERPARAMETERS || length != sizeof next + sizeof values) {
        return covey_fail(COVEY_BAD_ARGUMENT, "%u hyperparameters in %u bytes, expected 2 in %u",
                          next.hyperparameter_count, length, (uint32_t)(sizeof next + sizeof values));
    }
    memcpy(values, (const uint8_t *)bytes + sizeof next, sizeof values);
    int32_t status = check_config(&next, values);
    if (status < 0) return status;
    status = make_workspace(next.batch_size);
    if (status < 0) return status;
    config = next;
    memcpy(own, values, sizeof own);
    configured = 1;
    return COVEY_OK;
}

int32_t covey_initialize(int64_t seed) {
    end_phase();
    network_initialize(&weights, seed);
    return COVEY_OK;
}

int32_t covey_load(const void *bytes, uint32_t length) {
    end_phase();
    chunk_clear(&data);
    int32_t status = chunk_decode(&data, bytes, length);
    loaded = status >= 0;
    return status;
}

/* ---- Work ---------------------------------------------------------------------------------- */

/* Memory for one minibatch's tensors. */
static int32_t make_stream(void) {
    stream_bytes = config.batch_size * (PIXELS + 1) * (uint32_t)sizeof(float);
    stream_block = covey_alloc(stream_bytes);
    if (stream_block) return COVEY_OK;
    return covey_fail(COVEY_NO_MEMORY, "no memory for tensors of %u images (%u bytes)", config.batch_size,
                      stream_bytes);
}

int32_t covey_begin(int32_t phase, int64_t first, int32_t units) {
    end_phase();
    memset(metrics, 0, sizeof metrics);
    if (phase != COVEY_TRAIN && phase != COVEY_EVALUATE && phase != COVEY_STREAM_TRAIN &&
        phase != COVEY_STREAM_EVALUATE) {
        return covey_fail(COVEY_UNSUPPORTED, "phase %d: this package knows TRAIN (1), EVALUATE (2) and their "
                          "streams (5, 6)", phase);
    }
    if (!configured) return covey_fail(COVEY_BAD_STATE, "covey_begin before a successful covey_configure");
    if (!loaded) return covey_fail(COVEY_BAD_STATE, "covey_begin before a successful covey_load");
    int32_t status = minibatches_begin(&way, phase, first, units, data.count, &config);
    if (status >= 0 && minibatches_streaming(&way)) status = make_stream();
    if (status < 0) end_phase();
    memset(&velocity, 0, sizeof velocity);
    return status;
}

/* Loss, hits and the gradient of the scores of a batch whose logits lie in the workspace. */
static int32_t score_batch(uint32_t count) {
    for (uint32_t e = 0; e < count; e++) {
        float *scores = work.scores + e * SCORES;
        uint32_t label = data.labels[way.which[e]], best = 0;
        for (uint32_t c = 1; c < CLASSES; c++) best = scores[c] > scores[best] ? c : best;
        float of_label = scores[label];
        float loss = network_softmax(scores) - of_label;
        if (!(loss - loss == 0.0f)) {
            return covey_fail(COVEY_DIVERGED, "the loss of image %u isn't finite: the weights have grown too "
                              "large; a lower learningRate may help", way.which[e]);
        }
        scores[label] -= 1.0f;
        metrics[LOSS_SUM] += loss;
        metrics[ACCURACY_SUM] += best == label;
    }
    metrics[LOSS_COUNT] += count;
    metrics[ACCURACY_COUNT] += count;
    return COVEY_OK;
}

/* The current minibatch's tensors; without any units there is nothing in them. */
static void stream_batch(uint32_t count, uint64_t shift_key, uint32_t shift) {
    float *images = stream_block;
    uint32_t *labels = (uint32_t *)(images + config.batch_size * PIXELS);
    memset(images, 0, count * PIXELS * sizeof *images);
    for (uint32_t e = 0; e < count; e++) {
        uint32_t image = way.which[e];
        chunk_draw(&data, image, chunk_displacement(shift_key, image, shift), images + e * PIXELS, COLUMNS);
        labels[e] = data.labels[image];
    }
    tensors[IMAGES] = (covey_span){(uint32_t)(uintptr_t)images, count * PIXELS};
    tensors[LABELS] = (covey_span){(uint32_t)(uintptr_t)labels, count};
}

int32_t covey_step(void) {
    if (way.phase == 0) return covey_fail(COVEY_BAD_STATE, "covey_step without a successful covey_begin");
    uint32_t most = way.phase == COVEY_EVALUATE ? EVALUATION_SLICE : config.batch_size;
    uint32_t count = minibatches_next(&way, most);
    uint32_t shift = minibatches_training(&way) ? (uint32_t)own[SHIFT] : 0;
    uint64_t shift_key = minibatches_augment_key(&way);
    if (minibatches_streaming(&way)) {
        stream_batch(count, shift_key, shift);
        return minibatches_left(&way);
    }
    if (count == 0) return 0;
    network_gather(&data, way.which, count, shift_key, shift, &work);
    network_forward(&weights, count, &work);
    int32_t status = score_batch(count);
    if (status < 0) {
        end_phase();
        return status;
    }
    if (way.phase == COVEY_TRAIN) {
        descent step = {(float)config.learning_rate, (float)own[MOMENTUM]};
        network_descend(&weights, &velocity, count, step, &work);
    }
    return minibatches_left(&way);
}

/* Ours and named in covey.h's last part: the images and labels of a stream's current minibatch. */
COVEY_EXPORT(covey_tensor) covey_span *covey_tensor(int32_t index) {
    return index >= 0 && index < TENSORS ? &tensors[index] : 0;
}

/* ---- Inference ----------------------------------------------------------------------------- */

int32_t covey_predict(const void *image, uint32_t length, void *output, uint32_t capacity) {
    float scores[CLASSES];
    if (length != PIXELS) {
        return covey_fail(COVEY_BAD_ARGUMENT, "an image has %u bytes, this one has %u", PIXELS, length);
    }
    if (capacity < sizeof scores) {
        return covey_fail(COVEY_BAD_ARGUMENT, "probabilities need %u bytes, there are %u",
                          (uint32_t)sizeof scores, capacity);
    }
    network_forward_image(&weights, image, scores);
    float normaliser = network_softmax(scores);
    if (!(normaliser - normaliser == 0.0f)) {
        return covey_fail(COVEY_DIVERGED, "the probabilities aren't finite: the weights are too large");
    }
    memcpy(output, scores, sizeof scores);
    return (int32_t)sizeof scores;
}

#endif
