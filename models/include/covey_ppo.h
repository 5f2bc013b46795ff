/*
 * covey_ppo.h: the whole of an experience package but its environment: plays episodes with the actor, learns
 * from them by proximal policy optimisation with generalised advantage estimation, evaluates on units of
 * its own. J. Schulman et al.: "Proximal policy optimization algorithms" (2017, arXiv:1707.06347), clipped
 * objective; "High-dimensional continuous control using generalized advantage estimation" (2016,
 * arXiv:1506.02438).
 *
 * In one source file of the package, after COVEY_SUPPORT_IMPLEMENTATION and covey_support.h, and after what
 * describes the environment:
 *
 *     OBSERVATIONS, ACTIONS, HIDDEN     sizes of the networks (covey_policy.h)
 *     STORED, STEPS_MOST, REWARD_MOST   of the record (covey_episodes.h)
 *     REWARD_SCALE                      what rewards are multiplied by before the critic learns from them
 *     environment                       a type: one episode in progress
 *     environment_reset(it, key)        begins the episode of a random key
 *     environment_step(it, action, end) one step; returns its reward, sets *end to TERMINATED if it ended
 *     environment_store(it, stored)     the observation, as the record keeps it
 *     environment_observe               see covey_episodes.h
 *
 * and, where it has them:
 *
 *     SUCCESS_METRIC                    defined: a metric `success`, the share of episodes with a return > 0
 *     SHAPING_HYPERPARAMETER            defined: UPDATE adds shaping * (discount * potential after - before)
 *                                       to each reward (A. Y. Ng, D. Harada, S. Russell 1999: it leaves the
 *                                       best policy as it is);
 *     environment_potential(stored)     is that potential. A metric `shapedReturn` has what was learnt from.
 *     environment_ready()               a status: whether play can begin (auxiliary weights are there)
 *
 * Units and seeds. The episode of unit n is a function of the weights, the configured seed and n. EVALUATE
 * plays greedily on units of a sequence of its own (EVALUATION_SEED), so that every checkpoint of every job
 * is measured on the same episodes. UPDATE shuffles by the configured seed and the record's first unit.
 */
#ifndef COVEY_PPO_H
#define COVEY_PPO_H

#include "covey.h"
#include "covey_episodes.h"
#include "covey_policy.h"

#define EVALUATION_SEED 0x6576616c75617465ll
#define BATCH_MOST 8192u
#define EPOCHS_MOST 100u
/* Steps of the environment, or samples of the optimizer, after which covey_step returns. */
#define PLAY_SLICE 2048u
#define UPDATE_SLICE 2048u
/* Random streams of a seed. (Initial weights use 1 to 6.) */
#define STREAM_UNITS 16u
#define STREAM_UPDATE 17u

/* The model's own hyperparameters, in manifest order. */
enum {
    DISCOUNT, TRACE, CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT, NORM_MOST,
#ifdef SHAPING_HYPERPARAMETER
    SHAPING,
#endif
    OWN_HYPERPARAMETERS
};

static const struct {
    const char *name, *bounds;
    double least, most;
} own_bounds[OWN_HYPERPARAMETERS] = {
    [DISCOUNT] = {"discount", "0 to 1", 0.0, 1.0},
    [TRACE] = {"trace", "0 to 1", 0.0, 1.0},
    [CLIP] = {"clip", "0.01 to 1", 0.01, 1.0},
    [ENTROPY_WEIGHT] = {"entropyWeight", "0 to 1", 0.0, 1.0},
    [VALUE_WEIGHT] = {"valueWeight", "0 to 10", 0.0, 10.0},
    [NORM_MOST] = {"gradientNorm", "0.001 to 1000", 0.001, 1000.0},
#ifdef SHAPING_HYPERPARAMETER
    [SHAPING] = {"shaping", "0 to 10", 0.0, 10.0},
#endif
};

/* The manifest's metrics, in order. */
enum {
    RETURN,
#ifdef SUCCESS_METRIC
    SUCCESS,
#endif
    LENGTH,
#ifdef SHAPING_HYPERPARAMETER
    SHAPED_RETURN,
#endif
    POLICY_LOSS, VALUE_LOSS, ENTROPY, DIVERGENCE, CLIPPED, METRICS
};

static policy weights __attribute__((aligned(16)));
static double metrics[2 * METRICS]; /* a sum and a count for each */

static covey_config config;
static double own[OWN_HYPERPARAMETERS];
static int configured;

static int32_t phase; /* 0: none */
static int64_t first_unit;
static uint32_t units, position; /* PLAY, EVALUATE: units done; UPDATE: samples of this epoch done */

int32_t covey_abi(void) { return COVEY_ABI; }
float *covey_weights(void) { return (float *)&weights; }
const double *covey_metrics(void) { return metrics; }

static void measure(int metric, double value) {
    metrics[2 * metric] += value;
    metrics[2 * metric + 1] += 1.0;
}

static void measure_episode(double total, uint32_t steps) {
    measure(RETURN, total);
#ifdef SUCCESS_METRIC
    measure(SUCCESS, total > 0.0);
#endif
    measure(LENGTH, steps);
}

/* ---- Play ------------------------------------------------------------------------------------ */

static episode_record record;
static int recorded; /* the record is that of a PLAY that finished */

/* One step's action; *log_probability is its own. */
static int32_t choose(const float logits[ACTIONS], int greedy, float uniform, float *log_probability) {
    float probabilities[ACTIONS], normaliser = policy_softmax(logits, probabilities);
    if (!(normaliser - normaliser == 0.0f)) {
        return covey_fail(COVEY_DIVERGED, "the policy's outputs aren't finite: the weights are too large");
    }
    int32_t action = 0;
    if (greedy) {
        for (int32_t a = 1; a < ACTIONS; a++) action = logits[a] > logits[action] ? a : action;
    } else {
        float below = probabilities[0];
        while (action < ACTIONS - 1 && uniform >= below) below += probabilities[++action];
    }
    float value = logits[action] - normaliser;
    value = value > 0.0f ? 0.0f : value;
    *log_probability = value < LOG_PROBABILITY_LEAST ? LOG_PROBABILITY_LEAST : value;
    return action;
}

/* Plays the episode of a unit into `into`: a pure function of (weights, seed, unit). */
static int32_t play(int64_t seed, int64_t unit, int greedy, episode *into) {
    static environment world;
    static float observation[OBSERVATIONS], hidden1[HIDDEN], hidden2[HIDDEN], logits[ACTIONS];
    uint64_t key = covey_random_key((int64_t)covey_random_key(seed, STREAM_UNITS), (uint64_t)unit);
    uint64_t actions_key = covey_random_key((int64_t)key, 1);
    network actor = policy_actor(&weights);
    environment_reset(&world, covey_random_key((int64_t)key, 0));
    environment_store(&world, into->observations[0]);
    into->end = RUNNING;
    for (into->steps = 0; into->end == RUNNING;) {
        uint32_t t = into->steps++;
        environment_observe(into->observations[t], observation);
        policy_forward(&actor, observation, hidden1, hidden2, logits);
        float uniform = covey_random_float(actions_key, t);
        int32_t action = choose(logits, greedy, uniform, into->log_probabilities + t);
        if (action < 0) return action;
        into->actions[t] = (uint8_t)action;
        into->rewards[t] = environment_step(&world, (uint32_t)action, &into->end);
        environment_store(&world, into->observations[t + 1]);
        if (into->end == RUNNING && into->steps == STEPS_MOST) into->end = TRUNCATED;
    }
    return COVEY_OK;
}

static int32_t play_slice(void) {
    static episode played;
    for (uint32_t done = 0; done < PLAY_SLICE && position < units;) {
        int64_t unit = first_unit + position, seed = phase == COVEY_PLAY ? config.seed : EVALUATION_SEED;
        int32_t status = play(seed, unit, phase == COVEY_EVALUATE, &played);
        if (status == COVEY_OK && phase == COVEY_PLAY) status = record_append(&record, &played, unit);
        if (status < 0) return status;
        double total = 0.0;
        for (uint32_t t = 0; t < played.steps; t++) total += played.rewards[t];
        measure_episode(total, played.steps);
        done += played.steps;
        position++;
    }
    recorded = phase == COVEY_PLAY && position == units;
    return (int32_t)(units - position);
}

COVEY_EXPORT(covey_experience) int32_t covey_experience(covey_span *span) {
    if (!recorded) return covey_fail(COVEY_BAD_STATE, "there is no experience before a PLAY has finished");
    *span = (covey_span){(uint32_t)(uintptr_t)record.bytes, record.length};
    return COVEY_OK;
}

/* ---- Update ---------------------------------------------------------------------------------- */

static episodes data;
static int loaded;

/* What UPDATE keeps of the loaded experience, in one block. */
static float *values;            /* [rows] the critic's, before learning */
static float *advantages;        /* [steps] normalised to mean 0, deviation 1 */
static float *targets;           /* [steps] of the critic */
static uint32_t *order;          /* [steps] samples of this epoch, shuffled */
static void *update_block;
static uint32_t update_bytes;
static uint32_t prepared, epoch; /* rows whose values are known; passes done */
static adam optimizer __attribute__((aligned(16)));
static policy gradient __attribute__((aligned(16)));

COVEY_EXPORT(covey_load_experience) int32_t covey_load_experience(const void *bytes, uint32_t length);

static void end_phase(void) {
    covey_free(update_block, update_bytes);
    update_block = 0;
    update_bytes = 0;
    first_unit = 0;
    units = position = prepared = epoch = 0;
    phase = 0;
}

int32_t covey_load_experience(const void *bytes, uint32_t length) {
    end_phase();
    episodes_clear(&data);
    loaded = 0;
    int32_t found = episodes_decode(&data, bytes, length);
    loaded = found >= 0;
    return found;
}

/* The critic's values of the next rows; false when all are known. */
static int prepare_slice(void) {
    static float hidden1[HIDDEN], hidden2[HIDDEN];
    network critic = policy_critic(&weights);
    uint32_t last = data.rows - prepared < UPDATE_SLICE ? data.rows : prepared + UPDATE_SLICE;
    for (; prepared < last; prepared++) {
        const float *observation = data.observations + (uint64_t)prepared * OBSERVATIONS;
        policy_forward(&critic, observation, hidden1, hidden2, values + prepared);
    }
    return prepared < data.rows;
}

/* What is learnt from at one step: the scaled reward, with shaping where there is any. */
static float learnt_reward(uint32_t unit, uint32_t step) {
    float reward = data.rewards[step];
#ifdef SHAPING_HYPERPARAMETER
    const uint8_t *stored = data.stored[unit] + (uint64_t)(step - data.starts[unit]) * STORED;
    int terminal = step + 1 == data.starts[unit + 1] && data.ends[unit] == TERMINATED;
    float after = terminal ? 0.0f : environment_potential(stored + STORED);
    reward += (float)own[SHAPING] * ((float)own[DISCOUNT] * after - environment_potential(stored));
#endif
    (void)unit;
    return reward;
}

/* Advantages and targets of one episode, from its last step to its first; its metrics. */
static void estimate_episode(uint32_t unit) {
    float discount = (float)own[DISCOUNT], trace = discount * (float)own[TRACE], advantage = 0.0f;
    double total = 0.0, shaped = 0.0;
    uint32_t first = data.starts[unit], last = data.starts[unit + 1];
    for (uint32_t step = last; step-- > first;) {
        uint32_t row = data.row[step];
        float reward = learnt_reward(unit, step);
        int terminal = step + 1 == last && data.ends[unit] == TERMINATED;
        float next = terminal ? 0.0f : values[row + 1];
        float delta = reward * REWARD_SCALE + discount * next - values[row];
        advantage = delta + trace * advantage;
        advantages[step] = advantage;
        targets[step] = advantage + values[row];
        shaped += reward;
    }
    for (uint32_t step = first; step < last; step++) total += data.rewards[step];
    measure_episode(total, last - first);
#ifdef SHAPING_HYPERPARAMETER
    measure(SHAPED_RETURN, shaped);
#endif
    (void)shaped;
}

static int32_t estimate(void) {
    double mean = 0.0, square = 0.0;
    for (uint32_t unit = 0; unit < data.units; unit++) estimate_episode(unit);
    for (uint32_t i = 0; i < data.steps; i++) mean += advantages[i];
    mean /= data.steps;
    for (uint32_t i = 0; i < data.steps; i++) square += (advantages[i] - mean) * (advantages[i] - mean);
    double deviation = __builtin_sqrt(square / data.steps);
    if (!(deviation - deviation == 0.0)) {
        return covey_fail(COVEY_DIVERGED, "the critic's values aren't finite: the weights are too large");
    }
    float centre = (float)mean, scale = (float)(1.0 / (deviation + 1e-8));
    for (uint32_t i = 0; i < data.steps; i++) advantages[i] = (advantages[i] - centre) * scale;
    return COVEY_OK;
}

static void order_epoch(void) {
    uint64_t seed = covey_random_key(config.seed, STREAM_UPDATE);
    uint64_t key = covey_random_key((int64_t)covey_random_key((int64_t)seed, (uint64_t)first_unit), epoch);
    for (uint32_t i = 0; i < data.steps; i++) order[i] = i;
    for (uint32_t i = data.steps; i > 1; i--) {
        uint32_t j = covey_random_below(key, i, i), kept = order[i - 1];
        order[i - 1] = order[j];
        order[j] = kept;
    }
}

/* Losses of one sample given the outputs; the logits and the value become the loss's slopes in them. */
static int32_t learn_sample(uint32_t step, float share, float logits[ACTIONS], float *value) {
    float probabilities[ACTIONS], normaliser = policy_softmax(logits, probabilities), entropy = 0.0f;
    float clip = (float)own[CLIP], weight = (float)own[ENTROPY_WEIGHT];
    uint32_t action = data.actions[step];
    float change = logits[action] - normaliser - data.log_probabilities[step];
    float ratio = covey_expf(change), advantage = advantages[step];
    float clipped = ratio < 1.0f - clip ? 1.0f - clip : ratio > 1.0f + clip ? 1.0f + clip : ratio;
    int binds = clipped * advantage < ratio * advantage;
    float objective = binds ? clipped * advantage : ratio * advantage;
    float error = *value - targets[step];
    for (int a = 0; a < ACTIONS; a++) entropy -= probabilities[a] * (logits[a] - normaliser);
    float loss = objective + error * error + entropy;
    if (!(loss - loss == 0.0f)) {
        return covey_fail(COVEY_DIVERGED, "the loss of a sample isn't finite: the weights have grown too "
                          "large; a lower learningRate may help");
    }
    float slope = binds ? 0.0f : -advantage * ratio * share;
    for (int a = 0; a < ACTIONS; a++) {
        float chosen = a == (int)action ? 1.0f : 0.0f;
        float of_entropy = probabilities[a] * (logits[a] - normaliser + entropy);
        logits[a] = slope * (chosen - probabilities[a]) + weight * share * of_entropy;
    }
    *value = (float)own[VALUE_WEIGHT] * share * error;
    measure(POLICY_LOSS, -objective);
    measure(VALUE_LOSS, 0.5f * error * error);
    measure(ENTROPY, entropy);
    measure(DIVERGENCE, ratio - 1.0f - change);
    measure(CLIPPED, ratio != clipped);
    return COVEY_OK;
}

/* Adds the gradient of `count` <= TILE samples to `gradient`. */
static int32_t learn_tile(const uint32_t *which, uint32_t count, float share, float (*actor_across)[HIDDEN],
                          float (*critic_across)[HIDDEN]) {
    static policy_scratch actor_work, critic_work;
    static float observations[TILE][OBSERVATIONS], logits[TILE][ACTIONS], of_value[TILE];
    network actor = policy_actor(&weights), critic = policy_critic(&weights);
    network actor_gradient = policy_actor(&gradient), critic_gradient = policy_critic(&gradient);
    for (uint32_t e = 0; e < count; e++) {
        const float *from = data.observations + (uint64_t)data.row[which[e]] * OBSERVATIONS;
        memcpy(observations[e], from, sizeof observations[e]);
        policy_forward(&actor, from, actor_work.hidden1[e], actor_work.hidden2[e], logits[e]);
        policy_forward(&critic, from, critic_work.hidden1[e], critic_work.hidden2[e], of_value + e);
        int32_t status = learn_sample(which[e], share, logits[e], of_value + e);
        if (status < 0) return status;
    }
    policy_backward(&actor, &actor_gradient, actor_across, observations[0], logits[0], count, &actor_work);
    policy_backward(&critic, &critic_gradient, critic_across, observations[0], of_value, count, &critic_work);
    return COVEY_OK;
}

/* One step of the optimizer on the samples [from, to) of the order. */
static int32_t learn_minibatch(uint32_t from, uint32_t to) {
    static float actor_across[HIDDEN][HIDDEN] __attribute__((aligned(16)));
    static float critic_across[HIDDEN][HIDDEN] __attribute__((aligned(16)));
    policy_transpose(weights.actor_weight2, actor_across);
    policy_transpose(weights.critic_weight2, critic_across);
    gradient = (policy){0};
    float share = 1.0f / (float)(to - from);
    for (uint32_t at = from; at < to; at += TILE) {
        uint32_t count = to - at < TILE ? to - at : TILE;
        int32_t status = learn_tile(order + at, count, share, actor_across, critic_across);
        if (status < 0) return status;
    }
    float norm = policy_norm(&gradient), most = (float)own[NORM_MOST];
    if (!(norm - norm == 0.0f)) return covey_fail(COVEY_DIVERGED, "the gradient isn't finite");
    float scale = norm > most ? most / norm : 1.0f;
    adam_step(&optimizer, &weights, &gradient, scale, config.learning_rate);
    return COVEY_OK;
}

/* Minibatches of an epoch: as many as come closest to batchSize, all of about the same size. */
static uint32_t minibatches(void) {
    uint32_t wanted = (data.steps + config.batch_size / 2) / config.batch_size;
    return wanted ? wanted : 1;
}

/* Units of work left; a unit counts once in each epoch, and samples are spread over units evenly. */
static int32_t update_left(void) {
    uint64_t samples = (uint64_t)(config.local_epochs - epoch) * data.steps - position;
    uint64_t left = data.steps ? (samples * units + data.steps - 1) / data.steps : 0;
    return left > INT32_MAX ? INT32_MAX : (int32_t)left;
}

static int32_t update_slice(void) {
    if (prepared < data.rows) {
        if (prepare_slice()) return update_left();
        int32_t status = estimate();
        if (status < 0) return status;
        order_epoch();
        return update_left();
    }
    uint32_t count = minibatches();
    for (uint32_t done = 0; done < UPDATE_SLICE && update_left() > 0;) {
        if (position == 0 && epoch > 0) order_epoch();
        uint32_t number = (uint32_t)(((uint64_t)position * count + count - 1) / data.steps), from = position;
        while ((uint64_t)number * data.steps / count <= position) number++;
        position = (uint32_t)((uint64_t)number * data.steps / count);
        done += position - from;
        int32_t status = learn_minibatch(from, position);
        if (status < 0) return status;
        if (position == data.steps) {
            position = 0;
            epoch++;
        }
    }
    return update_left();
}

/* ---- Configuration and phases ---------------------------------------------------------------- */

static int32_t check_config(const covey_config *c, const double *given) {
    if (c->batch_size < 1 || c->batch_size > BATCH_MOST) {
        return covey_fail(COVEY_BAD_ARGUMENT, "batchSize is %u, expected 1 to %u", c->batch_size, BATCH_MOST);
    }
    if (c->local_epochs < 1 || c->local_epochs > EPOCHS_MOST) {
        return covey_fail(COVEY_BAD_ARGUMENT, "localEpochs is %u, expected 1 to %u", c->local_epochs,
                          EPOCHS_MOST);
    }
    if (!(c->learning_rate >= 1e-6 && c->learning_rate <= 1.0)) {
        return covey_fail(COVEY_BAD_ARGUMENT, "learningRate is out of bounds, expected 1e-6 to 1");
    }
    for (int i = 0; i < OWN_HYPERPARAMETERS; i++) {
        if (!(given[i] >= own_bounds[i].least && given[i] <= own_bounds[i].most)) {
            return covey_fail(COVEY_BAD_ARGUMENT, "%s is out of bounds, expected %s", own_bounds[i].name,
                              own_bounds[i].bounds);
        }
    }
    return COVEY_OK;
}

int32_t covey_configure(const void *bytes, uint32_t length) {
    covey_config next;
    double given[OWN_HYPERPARAMETERS];
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
    if (next.hyperparameter_count != OWN_HYPERPARAMETERS || length != sizeof next + sizeof given) {
        return covey_fail(COVEY_BAD_ARGUMENT, "%u hyperparameters in %u bytes, expected %u in %u",
                          next.hyperparameter_count, length, (uint32_t)OWN_HYPERPARAMETERS,
                          (uint32_t)(sizeof next + sizeof given));
    }
    memcpy(given, (const uint8_t *)bytes + sizeof next, sizeof given);
    int32_t status = check_config(&next, given);
    if (status < 0) return status;
    config = next;
    memcpy(own, given, sizeof own);
    configured = 1;
    return COVEY_OK;
}

int32_t covey_initialize(int64_t seed) {
    end_phase();
    policy_initialize(&weights, seed);
    return COVEY_OK;
}

int32_t covey_load(const void *bytes, uint32_t length) {
    (void)bytes;
    (void)length;
    return covey_fail(COVEY_UNSUPPORTED, "this package makes its own units and reads no chunks");
}

static int32_t begin_play(void) {
#ifdef environment_ready
    int32_t status = environment_ready();
    if (status < 0) return status;
#endif
    if (phase == COVEY_PLAY) record_clear(&record);
    return COVEY_OK;
}

static int32_t begin_update(void) {
    if (!loaded) {
        return covey_fail(COVEY_BAD_STATE, "UPDATE needs experience: covey_load_experience comes first");
    }
    if (units != data.units || (units && first_unit != data.first)) {
        return covey_fail(COVEY_BAD_ARGUMENT, "UPDATE is begun on other units than the %u of the experience "
                          "that is loaded", data.units);
    }
    uint64_t bytes = 4ull * data.rows + 12ull * data.steps;
    update_block = bytes > EPISODES_BYTES_MOST ? 0 : covey_alloc((uint32_t)bytes);
    if (!update_block) return covey_fail(COVEY_NO_MEMORY, "no memory to learn from %u steps", data.steps);
    update_bytes = (uint32_t)bytes;
    values = update_block;
    advantages = values + data.rows;
    targets = advantages + data.steps;
    order = (uint32_t *)(targets + data.steps);
    adam_start(&optimizer);
    return COVEY_OK;
}

int32_t covey_begin(int32_t wanted, int64_t first, int32_t count) {
    end_phase();
    recorded = 0;
    memset(metrics, 0, sizeof metrics);
    if (!configured) return covey_fail(COVEY_BAD_STATE, "covey_begin before covey_configure");
    if (wanted != COVEY_PLAY && wanted != COVEY_UPDATE && wanted != COVEY_EVALUATE) {
        return covey_fail(COVEY_UNSUPPORTED, "phase %d: this package knows EVALUATE (2), PLAY (3) and UPDATE "
                          "(4)", wanted);
    }
    if (first < 0 || count < 0 || first > INT64_MAX - count) {
        return covey_fail(COVEY_BAD_ARGUMENT, "units begin at 0 or above, and %d can't be their number here",
                          count);
    }
    phase = wanted;
    first_unit = first;
    units = (uint32_t)count;
    int32_t status = phase == COVEY_UPDATE ? begin_update() : begin_play();
    if (status < 0) end_phase();
    return status;
}

int32_t covey_step(void) {
    if (phase == 0) return covey_fail(COVEY_BAD_STATE, "covey_step without a successful covey_begin");
    int32_t status = 0;
    if (phase != COVEY_UPDATE) {
        status = play_slice();
    } else if (update_left() > 0) {
        status = update_slice();
    }
    if (status < 0) end_phase();
    return status;
}

#endif
