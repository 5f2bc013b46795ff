/* digits.c: the package `digits` as Covey sees it: state, checks, and one minibatch at a time. */
#include "covey.h"

#define COVEY_SUPPORT_IMPLEMENTATION
#include "covey_support.h"

#include "chunk.h"
#include "covey_random.h"
#include "network.h"

#define BATCH_MOST 512u
#define EPOCHS_MOST 100u
#define EVALUATION_SLICE 128u
/* The model's own hyperparameters, in manifest order. */
enum { MOMENTUM, SHIFT, OWN_HYPERPARAMETERS };
#define SHIFT_MOST 8
/* The manifest's metrics: sum and count of each. */
enum { LOSS_SUM, LOSS_COUNT, ACCURACY_SUM, ACCURACY_COUNT, METRIC_VALUES };
/* Random streams of a seed, two for each local epoch. (Initial weights use 1 and 2.) */
#define STREAM_SHUFFLE 16u
#define STREAM_SHIFT 17u

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

/* The phase in progress. */
static int32_t phase; /* 0: none */
static uint32_t *order; /* [units] the images of this epoch, in order */
static uint32_t first_unit, units, position, epoch;

int32_t covey_abi(void) { return COVEY_ABI; }
float *covey_weights(void) { return (float *)&weights; }
const double *covey_metrics(void) { return metrics; }

static void end_phase(void) {
    if (order) covey_free(order, units * (uint32_t)sizeof *order);
    order = 0;
    first_unit = units = position = epoch = 0;
    phase = 0;
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
    uint32_t examples = workspace_rows(batch > EVALUATION_SLICE ? batch : EVALUATION_SLICE);
    uint32_t hidden_bytes = examples * HIDDEN * (uint32_t)sizeof(float);
    uint32_t score_bytes = examples * SCORES * (uint32_t)sizeof(float);
    uint32_t term_bytes = examples * PIXELS * (uint32_t)sizeof(term);
    covey_free(work_block, work_bytes);
    work_bytes = hidden_bytes + score_bytes + 2 * term_bytes + (examples + 1) * (uint32_t)sizeof(uint32_t);
    uint8_t *at = work_block = covey_alloc(work_bytes);
    if (!at) return covey_fail(COVEY_NO_MEMORY, "no memory for batches of %u (%u bytes)", batch, work_bytes);
    memset(at, 0, hidden_bytes + score_bytes);
    work.hidden = (float *)at;
    work.scores = (float *)(at += hidden_bytes);
    work.terms = (term *)(at += score_bytes);
    work.columns = (term *)(at += term_bytes);
    work.starts = (uint32_t *)(at + term_bytes);
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

/* The order of one epoch's units: Fisher and Yates's shuffle in training, as they lie in evaluation. */
static void order_epoch(void) {
    for (uint32_t i = 0; i < units; i++) order[i] = first_unit + i;
    if (phase != COVEY_TRAIN) return;
    uint64_t key = covey_random_key(config.seed, STREAM_SHUFFLE + 2 * epoch);
    for (uint32_t i = units; i > 1; i--) {
        uint32_t j = covey_random_below(key, i, i), kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
}

int32_t covey_begin(int32_t wanted, int64_t first, int32_t count) {
    end_phase();
    memset(metrics, 0, sizeof metrics);
    if (wanted != COVEY_TRAIN && wanted != COVEY_EVALUATE) {
        return covey_fail(COVEY_UNSUPPORTED, "phase %d: this package knows TRAIN (1), EVALUATE (2)", wanted);
    }
    if (!configured) return covey_fail(COVEY_BAD_STATE, "covey_begin before a successful covey_configure");
    if (!loaded) return covey_fail(COVEY_BAD_STATE, "covey_begin before a successful covey_load");
    if (first < 0 || count < 0 || first > data.count || (uint32_t)count > data.count - (uint32_t)first) {
        return covey_fail(COVEY_BAD_ARGUMENT, "the units asked for aren't within the %u that are loaded",
                          data.count);
    }
    order = covey_alloc((uint32_t)count * (uint32_t)sizeof *order);
    if (!order) return covey_fail(COVEY_NO_MEMORY, "no memory for the order of %u units", (uint32_t)count);
    phase = wanted;
    units = (uint32_t)count;
    first_unit = (uint32_t)first;
    memset(&velocity, 0, sizeof velocity);
    order_epoch();
    return COVEY_OK;
}

/* Loss, hits and the gradient of the scores of a batch whose logits lie in the workspace. */
static int32_t score_batch(const uint32_t *which, uint32_t count) {
    for (uint32_t e = 0; e < count; e++) {
        float *scores = work.scores + e * SCORES;
        uint32_t label = data.labels[which[e]], best = 0;
        for (uint32_t c = 1; c < CLASSES; c++) best = scores[c] > scores[best] ? c : best;
        float of_label = scores[label];
        float loss = network_softmax(scores) - of_label;
        if (!(loss - loss == 0.0f)) {
            return covey_fail(COVEY_DIVERGED, "the loss of image %u isn't finite: the weights have grown too "
                              "large; a lower learningRate may help", which[e]);
        }
        scores[label] -= 1.0f;
        metrics[LOSS_SUM] += loss;
        metrics[ACCURACY_SUM] += best == label;
    }
    metrics[LOSS_COUNT] += count;
    metrics[ACCURACY_COUNT] += count;
    return COVEY_OK;
}

static int32_t units_left(void) {
    uint64_t epochs = phase == COVEY_TRAIN ? config.local_epochs : 1;
    uint64_t left = (epochs - epoch) * units - position;
    return left > INT32_MAX ? INT32_MAX : (int32_t)left;
}

int32_t covey_step(void) {
    if (phase == 0) return covey_fail(COVEY_BAD_STATE, "covey_step without a successful covey_begin");
    int32_t left = units_left();
    if (left == 0) return 0;
    if (position == units) {
        epoch++;
        position = 0;
        order_epoch();
    }
    uint32_t slice = phase == COVEY_TRAIN ? config.batch_size : EVALUATION_SLICE;
    uint32_t count = units - position < slice ? units - position : slice;
    const uint32_t *which = order + position;
    uint32_t shift = phase == COVEY_TRAIN ? (uint32_t)own[SHIFT] : 0;
    uint64_t shift_key = covey_random_key(config.seed, STREAM_SHIFT + 2 * epoch);
    network_gather(&data, which, count, shift_key, shift, &work);
    network_forward(&weights, count, &work);
    int32_t status = score_batch(which, count);
    if (status < 0) {
        end_phase();
        return status;
    }
    if (phase == COVEY_TRAIN) {
        descent step = {(float)config.learning_rate, (float)own[MOMENTUM]};
        network_descend(&weights, &velocity, count, step, &work);
    }
    position += count;
    return units_left();
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
