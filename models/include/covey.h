/*
 * covey.h: the C side of the Covey WASM interface, ABI 1.
 *
 * A package's module is a core WebAssembly module without WASI. It may import one function,
 * `covey.log`, and exports the functions declared here. Everything is little-endian; pointers and
 * lengths are 32-bit offsets into the module's own exported `memory`.
 *
 * The host calls from one thread and never re-enters. It may drop an instance at any moment, so no
 * call may matter beyond its reply. A module sees no clock, no file, no network and no host
 * randomness: what it computes must be a pure function of its weights, what it loaded and its
 * configuration, to the bit. (No relaxed SIMD, no threads; sums in a fixed order.)
 *
 * The life of an instance:
 *
 *     covey_abi                                     must return COVEY_ABI
 *     covey_configure                               hyperparameters of the job
 *     covey_initialize                              only to make the weights of round 0
 *     (the host writes weights at covey_weights)    for every other use
 *     covey_load                                    a chunk; may be repeated, replaces the last one
 *     covey_begin, covey_step until it returns 0    TRAIN or EVALUATE (or PLAY, UPDATE, or a stream)
 *     covey_metrics, (the host reads the weights)   what came of it
 *     covey_predict                                 inference, at any time after the weights are there
 *
 * Status: a negative i32 is an error, and covey_error() then says what is wrong in words. A call
 * that failed leaves the weights as they were, except covey_step, after which the host drops them.
 * A trap is never a valid answer to bad input: check every length and index.
 */
#ifndef COVEY_H
#define COVEY_H

#include <stdint.h>

#define COVEY_ABI 1

/* Marks a function as an export of the module under its own name. */
#define COVEY_EXPORT(name) __attribute__((export_name(#name), visibility("default")))

/*
 * Negative statuses. The host treats them all alike (the words of covey_error() go to a person);
 * the numbers are a convention that lets tests tell causes apart.
 */
enum {
    COVEY_OK = 0,
    COVEY_BAD_ARGUMENT = -1, /* a length, range or hyperparameter is out of bounds */
    COVEY_BAD_DATA = -2,     /* a chunk or an input doesn't follow its format */
    COVEY_BAD_STATE = -3,    /* the call doesn't fit here: not configured, nothing loaded, not begun */
    COVEY_NO_MEMORY = -4,    /* the host's memory limit doesn't allow it */
    COVEY_UNSUPPORTED = -5,  /* this package doesn't do that (say, PLAY in a dataset package) */
    COVEY_DIVERGED = -6      /* training left the finite numbers */
};

/* What covey_begin starts. */
enum {
    COVEY_TRAIN = 1,           /* local_epochs passes of the optimizer over the units; changes the weights */
    COVEY_EVALUATE = 2,        /* one pass over the units without changing anything but the metrics */
    COVEY_PLAY = 3,            /* experience packages: play units with the weights, record what happened */
    COVEY_UPDATE = 4,          /* experience packages: train once over the loaded experience, in unit order */
    COVEY_STREAM_TRAIN = 5,    /* dataset packages with a GPU plan: the minibatches of a TRAIN, one a step */
    COVEY_STREAM_EVALUATE = 6, /* the same for an EVALUATE */
    COVEY_STREAM_UPDATE = 7    /* experience packages with a GPU plan: what UPDATE trains on, in its order */
};

/* Levels of covey.log. */
enum { COVEY_LOG_DEBUG = 0, COVEY_LOG_INFO = 1, COVEY_LOG_WARNING = 2, COVEY_LOG_ERROR = 3 };

/*
 * The configuration as covey_configure receives it: this struct, then `hyperparameter_count` f64.
 * Those are the model's own hyperparameters, in manifest order: all that the manifest lists other
 * than batchSize, learningRate and localEpochs. The host's buffer has no promised alignment beyond
 * covey_alloc's 16 bytes; copy the struct out before use.
 */
typedef struct {
    uint32_t version;              /* @0  layout of this struct: 1 */
    uint32_t batch_size;           /* @4  units of one minibatch, >= 1 */
    int64_t seed;                  /* @8  of this assignment: shuffling, dropout, play */
    double learning_rate;          /* @16 > 0 */
    uint32_t local_epochs;         /* @24 passes of a TRAIN over its units, >= 1 */
    uint32_t hyperparameter_count; /* @28 how many f64 follow @32 */
} covey_config;

_Static_assert(sizeof(covey_config) == 32, "the ABI fixes the layout of covey_config");

/* A piece of the module's memory, as covey_experience and covey_tensor hand it out. */
typedef struct {
    uint32_t pointer;
    uint32_t length; /* covey_experience: bytes; covey_tensor: elements */
} covey_span;

/* ---- The one import ------------------------------------------------------------------------ */

/* A line for the host's log: UTF-8, no NUL needed. The host bounds its length and its rate. */
__attribute__((import_module("covey"), import_name("log"))) void covey_log(int32_t level, const char *text,
                                                                           int32_t length);

/* ---- Required exports ---------------------------------------------------------------------- */

/* The ABI that the module was written for: COVEY_ABI. */
COVEY_EXPORT(covey_abi) int32_t covey_abi(void);

/* `bytes` of memory aligned to 16, or 0 when there is none. Zero bytes give a valid pointer too. */
COVEY_EXPORT(covey_alloc) void *covey_alloc(uint32_t bytes);

/* Gives back what covey_alloc gave; `bytes` as it was asked for. A null pointer is ignored. */
COVEY_EXPORT(covey_free) void covey_free(void *pointer, uint32_t bytes);

/* Takes a covey_config. Ends whatever was begun. Values out of bounds: COVEY_BAD_ARGUMENT. */
COVEY_EXPORT(covey_configure) int32_t covey_configure(const void *config, uint32_t length);

/*
 * The f32 weights in place, in manifest order, each tensor row-major, without gaps. Valid for the
 * life of the instance. The host reads and writes here; it asks again after each call, because a
 * growing memory moves on its side.
 */
COVEY_EXPORT(covey_weights) float *covey_weights(void);

/* Fills the weights with those of round 0: a pure function of `seed`. */
COVEY_EXPORT(covey_initialize) int32_t covey_initialize(int64_t seed);

/*
 * Decodes a chunk and returns its units (>= 0; a chunk without any is valid). Copies what it needs:
 * the host frees the buffer afterwards. Replaces what was loaded before; after an error nothing is
 * loaded. Whatever the bytes are, it must neither trap nor read past them.
 */
COVEY_EXPORT(covey_load) int32_t covey_load(const void *chunk, uint32_t length);

/*
 * Starts work on the units [first, first + units) of what is loaded. Metrics and all optimizer state
 * start from zero, so that an assignment is a pure function of (weights, chunk, configuration).
 * Zero units are valid; the first step then returns 0.
 */
COVEY_EXPORT(covey_begin) int32_t covey_begin(int32_t phase, int64_t first, int32_t units);

/*
 * One bounded slice of the work (a minibatch, an episode). Returns the units of work left (> 0; a
 * unit counts once in each local epoch), 0 when finished. The host measures, reports and cancels
 * between steps, and kills the worker when a step takes longer than the manifest's limits allow.
 */
COVEY_EXPORT(covey_step) int32_t covey_step(void);

/*
 * f64[2 * metrics]: for each metric of the manifest, in order, the sum and the count it is over.
 * The value is sum / count; a count of 0 means that it isn't known (it is never shown as 0).
 */
COVEY_EXPORT(covey_metrics) const double *covey_metrics(void);

/*
 * One inference: the manifest's input tensors one after the other in `input`, its outputs the same
 * way into `output`. Returns the bytes written. Doesn't disturb a phase in progress.
 */
COVEY_EXPORT(covey_predict)
int32_t covey_predict(const void *input, uint32_t input_length, void *output, uint32_t output_capacity);

/* What went wrong: UTF-8 with a NUL at its end, about the last call that returned a negative status. */
COVEY_EXPORT(covey_error) const char *covey_error(void);

/*
 * ---- Optional exports ----------------------------------------------------------------------
 * A package that needs one defines it with COVEY_EXPORT; the host looks for it by name.
 *
 * int32_t covey_experience(covey_span *span)
 *     After a PLAY: where the record of what happened lies (bytes), unit by unit, in unit order.
 *     The record must be self-contained, and concatenating the records of adjoining unit ranges must
 *     give the record of the joined range: the host builds the input of UPDATE that way, and never
 *     looks inside. PLAY is a pure function of (weights, unit index, seed), so it doesn't matter how
 *     many workers shared the units. Valid until the next call that changes anything.
 *
 * int32_t covey_load_experience(const void *record, uint32_t length)
 *     Takes one record, or a concatenation, for UPDATE; returns its units or a negative status.
 *     The same rules as for covey_load: the bytes may be anything.
 *
 * int32_t covey_load_auxiliary(int32_t index, const void *bytes, uint32_t length)
 *     Hands over an auxiliary file of the package: `index` counts the manifest's auxiliaryWeights from
 *     0 and goes on through its auxiliaryFiles. The host has checked size and digest, and calls it for
 *     every one of them, in order, after covey_configure and before anything is begun or predicted; a
 *     later covey_configure doesn't take them away. Copies what it needs; the same index again
 *     replaces. Returns 0 or a negative status, and the same rules as for covey_load hold. What needs
 *     a file that wasn't handed over fails with COVEY_BAD_STATE.
 *
 * How the phases of an experience package go together, for the units [first, first + units):
 *
 *     covey_begin(COVEY_PLAY, first, units), covey_step until 0, covey_experience
 *                       by one instance, or by several that share the range; all with the same weights
 *                       and the same configuration, whose seed is the sequence's
 *     covey_load_experience(records one after the other, in unit order) returns `units`
 *     covey_begin(COVEY_UPDATE, first, units), covey_step until 0, covey_metrics, the weights
 *                       `first` and `units` must be those of the record. What was loaded or recorded
 *                       outlives covey_configure: UPDATE may have a seed of its own, which shuffles.
 *                       The metrics of an assignment
 *                       are those after UPDATE: what PLAY measures (a return) is in the record too, and
 *                       UPDATE counts it from there, so that it doesn't matter who played what.
 *     covey_begin(COVEY_EVALUATE, first, units), covey_step until 0, covey_metrics
 *                       plays units of a fixed sequence of the package's own, whatever the seed, and
 *                       records nothing: unit n is the same for every checkpoint of every job.
 *
 *     In UPDATE the work is units x local_epochs, as in TRAIN.
 *
 * covey_span *covey_tensor(int32_t index)
 *     Decoded inputs for the GPU plan of the package: where tensor `index` lies, and its elements
 *     (4 bytes each, f32 or u32 as the plan says). Null when there is no such tensor. A dataset
 *     package offers its batch stream, an experience package its trajectories. The order of tensors
 *     is the package's affair; plan.json names them by index. Valid until the next call that changes
 *     anything; with nothing in it, a tensor has 0 elements.
 *
 * The batch stream of a package with a GPU plan:
 *
 *     covey_begin(COVEY_STREAM_TRAIN or COVEY_STREAM_EVALUATE or COVEY_STREAM_UPDATE, first, units)
 *     covey_step()      makes one minibatch and trains nothing; returns the units of work left after it
 *     covey_tensor(i)   that minibatch, decoded: what the module's own kernels would compute on
 *
 *     STREAM_TRAIN makes the minibatches of a TRAIN with the same configuration: same seed, same
 *     order, same augmentation, same sizes. A minibatch never crosses the end of a local epoch.
 *     STREAM_EVALUATE goes through the units as they lie, in minibatches of batch_size. The work is
 *     units x local_epochs for the first and `units` for the second, so a minibatch has as many
 *     units as the step took off what was left before it. The last minibatch comes with the step
 *     that returns 0. Zero units: the first step returns 0, and there is nothing in the tensors; the
 *     same holds for any step after the last. Weights stay as they are, and metrics stay at zero:
 *     the GPU has both. STREAM_UPDATE is to UPDATE what STREAM_TRAIN is to TRAIN.
 */

#endif
