/* Rows of a batch: tokens gathered from memory maps, widened and labelled in one pass.

   A row is a sequence of spans, each of one document: an address, a number of tokens and their type. This file
   knows no files or corpora; `penstock_spans` checks spans against the bounds of their maps. The plain
   reference is collate.py. Addresses need not be aligned: some formats put tokens at odd bytes. */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RUSAGE_THREAD */
#endif
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#define PADDING 0
#define IGNORED (-100)
#define BYTES_AHEAD 8192 /* prefetch distance: documents are shuffled, so each would begin with a cache miss */
#define CHUNK 256        /* tokens between two prefetches: too many at once wait for one another */
#define LINE 64
#define ROWS_IN_MEMORY 4 /* rows in memory after which read-ahead stops: a request costs 1/10 of packing */

enum { UINT16, UINT32 };

typedef struct {
  const int64_t *spans;  /* [n][2]: address of the first token or PADDING; then packed count and flags, see `read_span` */
  const int32_t *firsts; /* [rows] first span of each row */
  const int32_t *pasts;  /* [rows] past-the-last span of each row */
} pool;

typedef struct {
  const unsigned char *at;
  int64_t count;
  int type;
  int goes_on; /* the document has a token after the span */
} span;

static span read_span(const int64_t *packed) {
  span s = {(const unsigned char *)(intptr_t)packed[0], packed[1] >> 2, packed[1] & 1, packed[1] >> 1 & 1};
  return s;
}

typedef struct {
  const pool *pools;
  const int64_t *slots, *rows;
  int64_t num_rows;
} request;

/* Prefetch position: runs ahead of the read position by BYTES_AHEAD. */
typedef struct {
  const request *of;
  int64_t row, span, past; /* number of a row, its next span, its past-the-last one */
  const unsigned char *at, *end;
} cursor;

static int to_next_span(cursor *c) {
  for (;;) {
    while (c->span == c->past) {
      if (++c->row >= c->of->num_rows) return 0;
      const pool *p = c->of->pools + c->of->slots[c->row];
      c->span = p->firsts[c->of->rows[c->row]], c->past = p->pasts[c->of->rows[c->row]];
    }
    span s = read_span(c->of->pools[c->of->slots[c->row]].spans + 2 * c->span++);
    if (!s.at) continue;
    c->at = s.at, c->end = s.at + (s.count << (s.type == UINT16 ? 1 : 2));
    return 1;
  }
}

/* Forced inline: gcc drops calls of a function that only prefetches. */
static inline __attribute__((always_inline)) void ask(cursor *c, int64_t bytes) {
  while (bytes > 0) {
    if (c->at >= c->end && !to_next_span(c)) return;
    __builtin_prefetch(c->at, 0, 3);
    int64_t in_line = LINE - ((intptr_t)c->at & (LINE - 1));
    if (in_line > c->end - c->at) in_line = c->end - c->at;
    c->at += in_line, bytes -= in_line;
  }
}

/* Widen one span into `ids`, and the token after each into `labels`; either may be null. */
#define DEFINE_WIDEN(name, out_t, in_t)                                                                        \
  typedef in_t name##_in __attribute__((aligned(1), may_alias));                                               \
  static void name(cursor *next, span s, out_t *restrict ids, out_t *restrict labels) {                        \
    const name##_in *in = (const name##_in *)s.at;                                                             \
    int64_t labelled = s.goes_on ? s.count : s.count - 1;                                                      \
    for (int64_t from = 0; from < s.count; from += CHUNK) {                                                    \
      int64_t to = s.count - from > CHUNK ? from + CHUNK : s.count;                                            \
      ask(next, (to - from) * (int64_t)sizeof(in_t));                                                          \
      if (ids)                                                                                                 \
        for (int64_t i = from; i < to; i++) ids[i] = (out_t)in[i];                                             \
      if (labels)                                                                                              \
        for (int64_t i = from; i < (to < labelled ? to : labelled); i++) labels[i] = (out_t)in[i + 1];         \
    }                                                                                                          \
    if (labels && !s.goes_on) labels[s.count - 1] = (out_t)IGNORED;                                            \
  }
DEFINE_WIDEN(widen_64_16, int64_t, uint16_t)
DEFINE_WIDEN(widen_64_32, int64_t, uint32_t)
DEFINE_WIDEN(widen_32_16, int32_t, uint16_t)
DEFINE_WIDEN(widen_32_32, int32_t, uint32_t)

#define DEFINE_FILL(name, out_t)                                                                               \
  static void name(cursor *next, span s, out_t *ids, out_t *labels) {                                          \
    if (!s.at) {                                                                                               \
      if (ids) memset(ids, 0, (size_t)s.count * sizeof(out_t));                                                \
      if (labels)                                                                                              \
        for (int64_t i = 0; i < s.count; i++) labels[i] = IGNORED;                                             \
    } else if (s.type == UINT16) {                                                                             \
      name##_16(next, s, ids, labels);                                                                         \
    } else {                                                                                                   \
      name##_32(next, s, ids, labels);                                                                         \
    }                                                                                                          \
  }
DEFINE_FILL(widen_64, int64_t)
DEFINE_FILL(widen_32, int32_t)

#define DEFINE_COUNT(name, out_t)                                                                              \
  static void name(out_t *out, int64_t count, int64_t from, int64_t by) {                                      \
    for (int64_t i = 0; i < count; i++) out[i] = (out_t)(from + i * by);                                       \
  }
DEFINE_COUNT(count_64, int64_t)
DEFINE_COUNT(count_32, int32_t)

typedef struct {
  int64_t shard, at, count, type; /* number, address, number of tokens, type */
} map;

static const map *map_of(const map *maps, int64_t n, int64_t shard) {
  int64_t low = 0;
  for (int64_t high = n; low < high;) {
    int64_t middle = low + (high - low) / 2;
    if (maps[middle].shard < shard)
      low = middle + 1;
    else
      high = middle;
  }
  return low < n && maps[low].shard == shard ? maps + low : 0;
}

/* Convert pieces [n][4] to spans [n][2]; a negative shard is padding. Returns 0, or -1 if a piece lies outside its
   shard.

   maps: [num_maps] of shards, by ascending number. */
int64_t penstock_spans(const void *pieces, int64_t wide, int64_t n, const map *maps, int64_t num_maps,
                       int64_t *spans) {
  const map *of = 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t piece[4];
    for (int k = 0; k < 4; k++)
      piece[k] = wide ? ((const int64_t *)pieces)[4 * i + k] : ((const int32_t *)pieces)[4 * i + k];
    int64_t shard = piece[0], start = piece[1], stop = piece[2], goes_on = piece[3];
    spans[2 * i] = 0, spans[2 * i + 1] = (stop - start) << 2;
    if (shard < 0) continue;
    if (!of || of->shard != shard) of = map_of(maps, num_maps, shard);
    if (!of || start < 0 || stop <= start || stop + goes_on > of->count) return -1;
    spans[2 * i] = of->at + (start << (of->type == UINT16 ? 1 : 2));
    spans[2 * i + 1] |= goes_on << 1 | of->type;
  }
  return 0;
}

/* Return the number of spans of rows, or -1 if a pool is not open yet; arguments as of `penstock_gather`. */
int64_t penstock_count_spans(const pool *pools, const int64_t *slots, const int64_t *rows, int64_t num_rows) {
  int64_t found = 0;
  for (int64_t r = 0; r < num_rows; r++)
    if (!pools[slots[r]].spans) return -1;
  for (int64_t r = 0; r < num_rows; r++)
    found += pools[slots[r]].pasts[rows[r]] - pools[slots[r]].firsts[rows[r]];
  return found;
}

/* Fill the fields of a batch [num_rows, length]; return 0, or 1 + the first row whose spans do not have `length`
   tokens. A null field is left out.

   pools: table of pools; slots, rows: [num_rows] index into it, and the row within the pool.
   width: bytes per number of ids, labels, positions and documents, 8 or 4.
   ends: [spans] int32, end of each span in the flattened batch. */
int64_t penstock_gather(const pool *pools, const int64_t *slots, const int64_t *rows, int64_t num_rows,
                        int64_t length, int64_t width, void *ids, void *labels, void *positions,
                        void *documents, int32_t *ends) {
  request all = {pools, slots, rows, num_rows};
  cursor next = {.of = &all, .row = -1};
  ask(&next, BYTES_AHEAD);
  for (int64_t r = 0; r < num_rows; r++) {
    const pool *p = pools + slots[r];
    int64_t first = p->firsts[rows[r]], past = p->pasts[rows[r]], done = 0;
    for (int64_t i = first; i < past; i++) {
      span s = read_span(p->spans + 2 * i);
      if (s.count < 1 || s.count > length - done) return r + 1;
      int64_t to = r * length + done;
      if (width == 8) {
        widen_64(&next, s, ids ? (int64_t *)ids + to : 0, labels ? (int64_t *)labels + to : 0);
        if (positions) count_64((int64_t *)positions + to, s.count, 0, 1);
        if (documents) count_64((int64_t *)documents + to, s.count, i - first, 0);
      } else {
        widen_32(&next, s, ids ? (int32_t *)ids + to : 0, labels ? (int32_t *)labels + to : 0);
        if (positions) count_32((int32_t *)positions + to, s.count, 0, 1);
        if (documents) count_32((int32_t *)documents + to, s.count, i - first, 0);
      }
      done += s.count;
      if (ends) *ends++ = (int32_t)(r * length + done);
    }
    if (done != length) return r + 1;
  }
  return 0;
}

/* Bits come in runs: eight at once are all ones or all zeros most of the time. */
#define DEFINE_MASK(name, out_t)                                                                               \
  static void name(const unsigned char *bits, int64_t from, int64_t count, out_t *labels) {                    \
    int64_t i = 0;                                                                                             \
    for (; i < count && from + i & 7; i++)                                                                     \
      if (!(bits[(from + i) >> 3] >> ((from + i) & 7) & 1)) labels[i] = (out_t)IGNORED;                        \
    for (; i + 8 <= count; i += 8) {                                                                           \
      unsigned eight = bits[(from + i) >> 3];                                                                  \
      if (eight == 0xff) continue;                                                                             \
      for (int k = 0; k < 8; k++) labels[i + k] = eight >> k & 1 ? labels[i + k] : (out_t)IGNORED;             \
    }                                                                                                          \
    for (; i < count; i++)                                                                                     \
      if (!(bits[(from + i) >> 3] >> ((from + i) & 7) & 1)) labels[i] = (out_t)IGNORED;                        \
  }
DEFINE_MASK(mask_64, int64_t)
DEFINE_MASK(mask_32, int32_t)

/* Read one column of bits for the labels of a batch: set labels whose token has a 0 to -100, or write the bits.

   pieces: [n][4] address of the bits of the piece's shard (0: the corpus has no such column, or padding), start, stop,
   and whether the document continues; in batch order. The label at a position is the token after it.
   width: bytes per label, 8 or 4. labels, out: either may be null; out is a byte per position, 0 without a label. */
int64_t penstock_bits(const int64_t *pieces, int64_t n, int64_t width, void *labels, unsigned char *out) {
  int64_t done = 0;
  for (int64_t i = 0; i < n; i++) {
    const unsigned char *bits = (const unsigned char *)(intptr_t)pieces[4 * i];
    int64_t start = pieces[4 * i + 1], count = pieces[4 * i + 2] - start;
    int64_t labelled = bits ? count - 1 + pieces[4 * i + 3] : 0;
    if (labels && width == 8) mask_64(bits, start + 1, labelled, (int64_t *)labels + done);
    if (labels && width == 4) mask_32(bits, start + 1, labelled, (int32_t *)labels + done);
    if (out) {
      for (int64_t k = 0; k < labelled; k++) out[done + k] = bits[(start + 1 + k) >> 3] >> ((start + 1 + k) & 7) & 1;
      memset(out + done + labelled, 0, (size_t)(count - labelled));
    }
    done += count;
  }
  return 0;
}

static void read_ahead(int64_t at, int64_t bytes) {
  int64_t page = sysconf(_SC_PAGESIZE), first = at / page * page;
  madvise((void *)(intptr_t)first, (size_t)(at + bytes - first), MADV_WILLNEED); /* a hint: it may fail */
}

static int64_t blocks_read(void) {
  struct rusage used;
#ifdef RUSAGE_THREAD
  getrusage(RUSAGE_THREAD, &used);
#else
  getrusage(RUSAGE_SELF, &used);
#endif
  return used.ru_inblock;
}

/* Ask the system to read ranges of memory maps, [n][2] address and bytes, from their files. Does not wait. Returns
   the number of blocks it started to read: 0 if all were in memory. */
int64_t penstock_read_ahead(const int64_t *ranges, int64_t n) {
  int64_t before = blocks_read();
  for (int64_t i = 0; i < n; i++) read_ahead(ranges[2 * i], ranges[2 * i + 1]);
  return blocks_read() - before;
}

/* The same for the tokens of rows, until several consecutive rows were in memory; arguments as of `penstock_gather`. */
void penstock_read_rows_ahead(const pool *pools, const int64_t *slots, const int64_t *rows, int64_t num_rows) {
  int64_t in_memory = 0;
  for (int64_t r = 0; r < num_rows && in_memory < ROWS_IN_MEMORY; r++) {
    int64_t before = blocks_read();
    const pool *p = pools + slots[r];
    for (int64_t i = p->firsts[rows[r]]; i < p->pasts[rows[r]]; i++) {
      span s = read_span(p->spans + 2 * i);
      if (s.at) read_ahead((int64_t)(intptr_t)s.at, s.count << (s.type == UINT16 ? 1 : 2));
    }
    in_memory = blocks_read() == before ? in_memory + 1 : 0;
  }
}
