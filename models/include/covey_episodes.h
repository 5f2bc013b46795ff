/*
 * covey_episodes.h: the record of what was played, for packages that make their own experience. PLAY writes
 * it, covey_load_experience reads it; it never leaves the device.
 *
 * Before including it, include what defines OBSERVATIONS, ACTIONS, STORED (bytes of an observation in the
 * record, a multiple of 4), STEPS_MOST and REWARD_MOST, and declares
 *
 *     int environment_observe(const uint8_t stored[STORED], float observation[OBSERVATIONS]);
 *
 * which turns a stored observation into what the networks see, or returns 0 when the bytes aren't one.
 *
 * A record is any number of episodes, one after the other, units ascending by one: so the records of
 * adjoining ranges put together are the record of the joined range. An episode, all little-endian:
 *
 *     header            episode_header below, 24 bytes
 *     observations      STORED bytes each, steps + 1 of them: the last is what followed the last step
 *     rewards           f32 each, steps of them: the environment's own, neither scaled nor shaped
 *     log probabilities f32 each, steps of them: of the action, by the policy that played, <= 0
 *     actions           u8 each, steps of them, then zeros up to a multiple of 4 bytes
 */
#ifndef COVEY_EPISODES_H
#define COVEY_EPISODES_H

#include <stdint.h>

#include "covey_support.h"

#define EPISODE_MAGIC 0x31505045u /* "EPP1" */
#define LOG_PROBABILITY_LEAST -80.0f
#define EPISODES_BYTES_MOST (1u << 30)

enum { RUNNING = 0, TERMINATED = 1, TRUNCATED = 2 };

typedef struct {
    uint32_t magic;
    uint32_t bytes; /* of this episode, header included */
    int64_t unit;
    uint32_t steps; /* 1 to STEPS_MOST */
    uint32_t end;   /* TERMINATED, or TRUNCATED: stopped after STEPS_MOST steps, though it could go on */
} episode_header;

_Static_assert(sizeof(episode_header) == 24, "the record fixes the layout of episode_header");

static inline uint32_t episode_bytes(uint32_t steps) {
    return (uint32_t)sizeof(episode_header) + STORED * (steps + 1) + 8 * steps + (steps + 3) / 4 * 4;
}

/* ---- Writing --------------------------------------------------------------------------------- */

/* One episode while it is played; episode_append puts it into a record. */
typedef struct {
    uint8_t observations[STEPS_MOST + 1][STORED];
    float rewards[STEPS_MOST], log_probabilities[STEPS_MOST];
    uint8_t actions[STEPS_MOST];
    uint32_t steps, end;
} episode;

typedef struct {
    uint8_t *bytes;
    uint32_t length, capacity;
} episode_record;

static inline void record_clear(episode_record *it) {
    covey_free(it->bytes, it->capacity);
    *it = (episode_record){0};
}

static inline int32_t record_append(episode_record *it, const episode *played, int64_t unit) {
    uint32_t bytes = episode_bytes(played->steps);
    if (it->length > EPISODES_BYTES_MOST - bytes) {
        return covey_fail(COVEY_NO_MEMORY, "a record holds at most %u bytes: play fewer units at a time",
                          EPISODES_BYTES_MOST);
    }
    if (it->length + bytes > it->capacity) {
        uint32_t capacity = it->capacity + it->capacity / 2 + bytes;
        uint8_t *larger = covey_alloc(capacity);
        if (!larger) return covey_fail(COVEY_NO_MEMORY, "no memory for a record of %u bytes", capacity);
        memcpy(larger, it->bytes, it->length);
        covey_free(it->bytes, it->capacity);
        it->bytes = larger;
        it->capacity = capacity;
    }
    episode_header header = {EPISODE_MAGIC, bytes, unit, played->steps, played->end};
    uint8_t *at = it->bytes + it->length;
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    memcpy(at, played->observations, STORED * (played->steps + 1));
    at += STORED * (played->steps + 1);
    memcpy(at, played->rewards, 4 * played->steps);
    at += 4 * played->steps;
    memcpy(at, played->log_probabilities, 4 * played->steps);
    at += 4 * played->steps;
    memset(at + played->steps / 4 * 4, 0, (played->steps + 3) / 4 * 4 - played->steps / 4 * 4);
    memcpy(at, played->actions, played->steps);
    it->length += bytes;
    return COVEY_OK;
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* A loaded record. Steps are numbered through all episodes; an episode has one observation more. */
typedef struct {
    uint32_t units, steps, rows; /* rows: observations, steps + units */
    int64_t first;               /* the first episode's unit */
    uint32_t *starts;            /* [units + 1] where an episode's steps begin */
    uint32_t *ends;              /* [units] TERMINATED or TRUNCATED */
    uint32_t *row;               /* [steps] a step's observation; row + 1 is what followed */
    float *observations;         /* [rows][OBSERVATIONS] */
    const uint8_t **stored;      /* [units] an episode's stored observations, in `copy` */
    float *rewards, *log_probabilities;
    uint8_t *actions;
    uint8_t *copy; /* the record's bytes */
    void *block;
    uint32_t block_bytes, copy_bytes;
} episodes;

static inline void episodes_clear(episodes *it) {
    covey_free(it->block, it->block_bytes);
    covey_free(it->copy, it->copy_bytes);
    *it = (episodes){0};
}

/* Checks every header; fills in the counts and the first unit. */
static inline int32_t episodes_count(episodes *into, const uint8_t *bytes, uint32_t length) {
    int64_t expected = 0;
    for (uint32_t at = 0; at < length;) {
        episode_header header;
        uint32_t left = length - at, unit = into->units;
        if (left < sizeof header) {
            return covey_fail(COVEY_BAD_DATA, "episode %u: %u bytes are left, a header has %u", unit, left,
                              (uint32_t)sizeof header);
        }
        memcpy(&header, bytes + at, sizeof header);
        if (header.magic != EPISODE_MAGIC) {
            return covey_fail(COVEY_BAD_DATA, "episode %u doesn't begin with EPP1: this is no record", unit);
        }
        if (header.steps < 1 || header.steps > STEPS_MOST) {
            return covey_fail(COVEY_BAD_DATA, "episode %u has %u steps, expected 1 to %u", unit, header.steps,
                              STEPS_MOST);
        }
        if (header.bytes != episode_bytes(header.steps) || header.bytes > left) {
            return covey_fail(COVEY_BAD_DATA, "episode %u of %u steps says %u bytes, expected %u, %u left",
                              unit, header.steps, header.bytes, episode_bytes(header.steps), left);
        }
        if (header.end != TERMINATED && !(header.end == TRUNCATED && header.steps == STEPS_MOST)) {
            return covey_fail(COVEY_BAD_DATA, "episode %u can't end this way (%u) after %u steps", unit,
                              header.end, header.steps);
        }
        if (header.unit < 0 || (unit && header.unit != expected)) {
            return covey_fail(COVEY_BAD_DATA, "episode %u isn't of the unit that follows the one before",
                              unit);
        }
        if (unit == 0) into->first = header.unit;
        expected = (int64_t)((uint64_t)header.unit + 1);
        into->units++;
        into->steps += header.steps;
        at += header.bytes;
    }
    into->rows = into->steps + into->units;
    return COVEY_OK;
}

/* Lays out the arrays; all counts are known. */
static inline int32_t episodes_reserve(episodes *into, uint32_t length) {
    uint64_t bytes = 4ull * into->rows * OBSERVATIONS + 12ull * into->steps + 12ull * into->units + 4 +
                     into->steps;
    if (bytes > EPISODES_BYTES_MOST) {
        return covey_fail(COVEY_NO_MEMORY, "%u steps are more than can be held at once", into->steps);
    }
    into->copy = covey_alloc(length);
    into->copy_bytes = into->copy ? length : 0;
    uint8_t *at = into->block = covey_alloc((uint32_t)bytes);
    into->block_bytes = into->block ? (uint32_t)bytes : 0;
    if (!into->copy || !at) {
        return covey_fail(COVEY_NO_MEMORY, "no memory for %u steps of experience", into->steps);
    }
    into->observations = (float *)at;
    into->rewards = into->observations + (uint64_t)into->rows * OBSERVATIONS;
    into->log_probabilities = into->rewards + into->steps;
    into->row = (uint32_t *)(into->log_probabilities + into->steps);
    into->ends = into->row + into->steps;
    into->stored = (const uint8_t **)(into->ends + into->units);
    into->starts = (uint32_t *)(into->stored + into->units);
    into->actions = (uint8_t *)(into->starts + into->units + 1);
    return COVEY_OK;
}

static inline int episodes_finite(float value, float least, float most) {
    return value >= least && value <= most;
}

/* Takes episode `unit`, whose header was checked, from `at`; returns a status. */
static inline int32_t episodes_take(episodes *into, uint32_t unit, uint32_t step, const uint8_t *at) {
    episode_header header;
    memcpy(&header, at, sizeof header);
    into->starts[unit] = step;
    into->ends[unit] = header.end;
    at += sizeof header;
    into->stored[unit] = at;
    uint32_t first_row = step + unit;
    for (uint32_t i = 0; i <= header.steps; i++, at += STORED) {
        if (!environment_observe(at, into->observations + (uint64_t)(first_row + i) * OBSERVATIONS)) {
            return covey_fail(COVEY_BAD_DATA, "episode %u: observation %u can't be one", unit, i);
        }
    }
    memcpy(into->rewards + step, at, 4 * header.steps);
    at += 4 * header.steps;
    memcpy(into->log_probabilities + step, at, 4 * header.steps);
    at += 4 * header.steps;
    memcpy(into->actions + step, at, header.steps);
    for (uint32_t i = header.steps; i % 4; i++) {
        if (at[i]) return covey_fail(COVEY_BAD_DATA, "episode %u ends in bytes that aren't zero", unit);
    }
    for (uint32_t i = step; i < step + header.steps; i++) {
        into->row[i] = i + unit;
        if (!episodes_finite(into->rewards[i], -REWARD_MOST, REWARD_MOST) ||
            !episodes_finite(into->log_probabilities[i], LOG_PROBABILITY_LEAST, 0.0f) ||
            into->actions[i] >= ACTIONS) {
            return covey_fail(COVEY_BAD_DATA, "episode %u, step %u: its reward, probability or action is out "
                              "of bounds", unit, i - step);
        }
    }
    return COVEY_OK;
}

/* Fills `into` (which must be empty) and returns the number of episodes, or a negative status. */
static inline int32_t episodes_decode(episodes *into, const uint8_t *bytes, uint32_t length) {
    int32_t status = episodes_count(into, bytes, length);
    if (status == COVEY_OK) status = episodes_reserve(into, length);
    if (status == COVEY_OK) memcpy(into->copy, bytes, length);
    uint32_t at = 0, step = 0;
    for (uint32_t unit = 0; status == COVEY_OK && unit < into->units; unit++) {
        episode_header header;
        memcpy(&header, into->copy + at, sizeof header);
        status = episodes_take(into, unit, step, into->copy + at);
        at += header.bytes;
        step += header.steps;
    }
    if (status != COVEY_OK) {
        episodes_clear(into);
        return status;
    }
    into->starts[into->units] = into->steps;
    return (int32_t)into->units;
}

#endif
