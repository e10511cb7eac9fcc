/* Pool packing: find fragments by document ends, shuffle them, place them into rows.

   Computes the same as corpus.py, pool.py and packing/, in the same order; the reasons are documented there. */

#include <stdint.h>
#include <stdlib.h>

typedef struct {
  int64_t fragment, offset, length, row;
} piece;

typedef struct {
  int64_t shard, low, high;      /* tokens [low, high) of the shard */
  const int64_t *ends;           /* ends of all its documents */
  int64_t num_ends, first, past; /* number of ends; those in (low, high], computed here */
} shard_range;

static int64_t ends_until(const shard_range *s, int64_t position) {
  int64_t low = 0, high = s->num_ends;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (s->ends[middle] > position)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/* Find the document ends in ranges [n]. Returns the maximum number of fragments, or -1 if ends do not
   ascend. */
int64_t penstock_find_ends(shard_range *ranges, int64_t n) {
  int64_t most = 0;
  for (shard_range *s = ranges; s < ranges + n; s++) {
    s->first = ends_until(s, s->low), s->past = ends_until(s, s->high);
    int64_t before = s->low;
    for (int64_t i = s->first; i < s->past; before = s->ends[i++])
      if (s->ends[i] < before || s->ends[i] > s->high) return -1;
    if (s->first == s->past && s->num_ends && s->low < s->ends[s->num_ends - 1] &&
        s->ends[s->num_ends - 1] <= s->high)
      return -1;
    most += s->past - s->first + 1;
  }
  return most;
}

typedef struct {
  int64_t shard, start, length, continued; /* start within the shard; whether the document continues */
} fragment;

/* Cut ranges [n] at the document ends found in them, as corpus.py's `fragments`. Returns their number. */
static int64_t cut(const shard_range *ranges, int64_t n, fragment *out) {
  int64_t found = 0;
  for (const shard_range *s = ranges; s < ranges + n; s++) {
    int64_t start = s->low;
    for (int64_t i = s->first; i <= s->past && start < s->high; i++) {
      int64_t end = i < s->past ? s->ends[i] : s->high;
      if (end == start) continue; /* an empty document */
      out[found++] = (fragment){s->shard, start, end - start, i == s->past};
      start = end;
    }
  }
  return found;
}

static uint64_t mix64(uint64_t value) {
  uint64_t z = value + 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

typedef struct {
  uint64_t key;
  int64_t index;
} keyed;

/* core/rng.py's `shuffled`: the argsort of distinct, evenly spread keys. Bucket sort by the highest bits, with about
   as many buckets as keys; insertion sort within a bucket. Returns 0, or -1 if out of memory. */
static int shuffled(int64_t n, uint64_t key, int64_t *out) {
  int bits = 1;
  while ((int64_t)1 << bits < n) bits++;
  int64_t buckets = (int64_t)1 << bits;
  int64_t *starts = calloc((size_t)buckets + 1, sizeof *starts);
  keyed *sorted = malloc((size_t)(n + 1) * sizeof *sorted);
  if (!starts || !sorted) {
    free(starts), free(sorted);
    return -1;
  }
  for (int64_t i = 0; i < n; i++) starts[(mix64((uint64_t)i ^ key) >> (64 - bits)) + 1]++;
  for (int64_t b = 0; b < buckets; b++) starts[b + 1] += starts[b];
  for (int64_t i = 0; i < n; i++) {
    keyed k = {mix64((uint64_t)i ^ key), i};
    sorted[starts[k.key >> (64 - bits)]++] = k; /* afterwards a bucket's start is the next one's */
  }
  for (int64_t i = 1; i < n; i++) {
    keyed k = sorted[i];
    int64_t at = i;
    for (; at && sorted[at - 1].key > k.key; at--) sorted[at] = sorted[at - 1];
    sorted[at] = k;
  }
  for (int64_t i = 0; i < n; i++) out[i] = sorted[i].index;
  free(starts), free(sorted);
  return 0;
}

/* Stable sort of `order` [n] by descending `values`, each in [0, most]; `spare` is [n]. */
static void sort_falling(int64_t *order, int64_t *spare, int64_t n, const int64_t *values, int64_t most) {
  enum { BITS = 11, BUCKETS = 1 << BITS };
  int64_t starts[BUCKETS + 1], *from = order, *to = spare;
  for (int shift = 0; most >> shift; shift += BITS) {
    for (int b = 0; b <= BUCKETS; b++) starts[b] = 0;
    for (int64_t i = 0; i < n; i++) starts[((most - values[from[i]]) >> shift & (BUCKETS - 1)) + 1]++;
    for (int b = 0; b < BUCKETS; b++) starts[b + 1] += starts[b];
    for (int64_t i = 0; i < n; i++) to[starts[(most - values[from[i]]) >> shift & (BUCKETS - 1)]++] = from[i];
    int64_t *swapped = from;
    from = to, to = swapped;
  }
  if (from != order)
    for (int64_t i = 0; i < n; i++) order[i] = from[i];
}

/* packing/concat.py: join, and cut every L tokens. Returns the pieces. */
static int64_t pack_concat(const int64_t *lengths, int64_t n, int64_t length, piece *out) {
  int64_t found = 0, row = 0, room = length;
  for (int64_t i = 0; i < n; i++)
    for (int64_t offset = 0; offset < lengths[i];) {
      int64_t take = lengths[i] - offset < room ? lengths[i] - offset : room;
      out[found++] = (piece){i, offset, take, row};
      offset += take;
      if (!(room -= take)) row++, room = length;
    }
  return found;
}

static void sift_up(int64_t *heap, int64_t at) {
  for (int64_t value = heap[at]; at; at = (at - 1) / 2) {
    if (heap[(at - 1) / 2] >= value) return;
    heap[at] = heap[(at - 1) / 2], heap[(at - 1) / 2] = value;
  }
}

static int64_t pop_largest(int64_t *heap, int64_t *size) {
  int64_t largest = heap[0], value = heap[--*size], at = 0;
  for (int64_t child; (child = 2 * at + 1) < *size; at = child) {
    if (child + 1 < *size && heap[child + 1] > heap[child]) child++;
    if (heap[child] <= value) break;
    heap[at] = heap[child];
  }
  heap[at] = value;
  return largest;
}

/* Place descending lengths into bins: `placed` is the bin of each, or -1; `left` [bins] becomes the remaining room.
   A bin is one integer, room in the upper bits and number in the lower; it is in `heap` if too tight for the present
   length, else in `fits`, the smallest last; as in packing/best_fit.py. */
static void best_fit(const int64_t *order, const int64_t *sizes, int64_t n, int64_t *left, int64_t bins,
                     int64_t *heap, int64_t *fits, int64_t *placed) {
  int bits = 1;
  while ((int64_t)1 << bits <= bins) bits++;
  int64_t tight = 0, fitting = 0, present = -1, number = ((int64_t)1 << bits) - 1;
  for (int64_t b = 0; b < bins; b++) heap[tight++] = left[b] << bits | b, sift_up(heap, tight - 1);
  for (int64_t i = 0; i < n; i++) {
    int64_t length = sizes[order[i]] << bits;
    if (tight && heap[0] >= length) { /* tight bins that now have enough room, the smallest first */
      if (present >= 0) heap[tight++] = present, sift_up(heap, tight - 1);
      while (tight && heap[0] >= length) fits[fitting++] = pop_largest(heap, &tight);
      present = fits[--fitting];
    } else if (present < length) {
      if (present >= 0) heap[tight++] = present, sift_up(heap, tight - 1);
      present = fitting ? fits[--fitting] : -1;
    }
    placed[i] = present < 0 ? -1 : present & number;
    if (present >= 0) present -= length, left[placed[i]] -= sizes[order[i]];
  }
}

/* packing/best_fit.py. `scratch` is [5 n + 4 num_rows]. Returns the pieces. */
static int64_t pack_best_fit(const int64_t *lengths, int64_t n, int64_t num_rows, int64_t length, piece *out,
                             int64_t *scratch) {
  int64_t *rest = scratch, *order = rest + n, *placed = order + n, *spare = placed + n, *left = spare + n;
  int64_t *rooms = left + n, *gaps = rooms + num_rows, *heap = gaps + num_rows, *fits = heap + num_rows;
  int64_t found = 0, rows = 0, rests = 0, total = 0, most = 0;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t offset = 0; lengths[i] - offset >= length; offset += length)
      out[found++] = (piece){i, offset, length, rows++};
    rest[i] = lengths[i] % length;
    total += lengths[i];
    if (rest[i]) order[rests++] = i;
    if (rest[i] > most) most = rest[i];
  }
  int64_t bins = num_rows - rows;
  for (int64_t b = 0; b < bins; b++) rooms[b] = length;
  if (bins) rooms[bins - 1] -= num_rows * length - total;
  sort_falling(order, spare, rests, rest, most);
  best_fit(order, rest, rests, rooms, bins, heap, fits, placed);

  int64_t num_left = 0, num_gaps = 0;
  for (int64_t i = 0; i < rests; i++) {
    if (placed[i] < 0)
      left[num_left++] = order[i];
    else
      out[found++] = (piece){order[i], lengths[order[i]] - rest[order[i]], rest[order[i]], rows + placed[i]};
  }
  for (int64_t b = 0; b < bins; b++)
    if (rooms[b]) gaps[num_gaps++] = b;
  sort_falling(gaps, heap, num_gaps, rooms, length);
  for (int64_t i = 0, gap = 0; i < num_left; i++) {
    int64_t fragment = left[i], offset = lengths[fragment] - rest[fragment];
    while (offset < lengths[fragment]) {
      int64_t room = rooms[gaps[gap]], take = lengths[fragment] - offset;
      if (take > room) take = room;
      out[found++] = (piece){fragment, offset, take, rows + gaps[gap]};
      offset += take;
      if (!(rooms[gaps[gap]] -= take)) gap++;
    }
  }
  return found;
}

static void put(void *table, int64_t wide, int64_t at, int64_t a, int64_t b, int64_t c, int64_t d) {
  if (wide) {
    int64_t *to = (int64_t *)table + 4 * at;
    to[0] = a, to[1] = b, to[2] = c, to[3] = d;
  } else {
    int32_t *to = (int32_t *)table + 4 * at;
    to[0] = (int32_t)a, to[1] = (int32_t)b, to[2] = (int32_t)c, to[3] = (int32_t)d;
  }
}

/* Shuffle the fragments of ranges [num_ranges], pack them, shuffle the rows: pool.py's `_pack`. Returns the
   pieces, or -1 if out of memory.

   most: result of `penstock_find_ends`.
   fits: whether rows are packed by best fit; otherwise fragments are joined and cut.
   pieces: [most + 2 num_rows + 1][4] int32, or int64 where `wide`; firsts, pasts: [num_rows]. */
int64_t penstock_pack(const shard_range *ranges, int64_t num_ranges, int64_t most, int64_t num_rows,
                      int64_t length, int64_t fits, uint64_t documents_key, uint64_t rows_key, int64_t wide,
                      void *pieces, int32_t *firsts, int32_t *pasts) {
  size_t most_pieces = (size_t)(most + 2 * num_rows + 1), numbers = (size_t)(7 * most + 7 * num_rows + 8);
  fragment *cuts = malloc((size_t)(most + 1) * sizeof *cuts);
  piece *packed = malloc(most_pieces * sizeof *packed), *by_row = malloc(most_pieces * sizeof *by_row);
  int64_t *mix = malloc(numbers * sizeof *mix), found = -1;
  if (!cuts || !packed || !by_row || !mix) goto end;
  int64_t n = cut(ranges, num_ranges, cuts);
  int64_t *mixed = mix + n, *row_starts = mixed + n, *rows = row_starts + num_rows + 1;
  int64_t *scratch = rows + num_rows, tokens = 0;
  if (shuffled(n, documents_key, mix)) goto end;
  for (int64_t i = 0; i < n; i++) tokens += mixed[i] = cuts[mix[i]].length;
  found = fits ? pack_best_fit(mixed, n, num_rows, length, packed, scratch)
               : pack_concat(mixed, n, length, packed);

  for (int64_t r = 0; r <= num_rows; r++) row_starts[r] = 0;
  for (int64_t i = 0; i < found; i++) row_starts[packed[i].row + 1]++;
  for (int64_t r = 0; r < num_rows; r++) row_starts[r + 1] += row_starts[r];
  for (int64_t i = 0; i < found; i++) by_row[row_starts[packed[i].row]++] = packed[i];
  for (int64_t i = 0; i < found; i++) {
    const fragment *of = cuts + mix[by_row[i].fragment];
    int64_t start = of->start + by_row[i].offset, past = start + by_row[i].length;
    put(pieces, wide, i, of->shard, start, past, past < of->start + of->length + of->continued);
  }
  /* row_starts[r] is now where row r ends. */
  int64_t missing = num_rows * length - tokens;
  if (missing) {
    put(pieces, wide, found++, -1, 0, missing, 0);
    row_starts[num_rows - 1] = found;
  }
  if (shuffled(num_rows - 1, rows_key, rows)) {
    found = -1;
    goto end;
  }
  rows[num_rows - 1] = num_rows - 1;
  for (int64_t r = 0; r < num_rows; r++) {
    firsts[r] = (int32_t)(rows[r] ? row_starts[rows[r] - 1] : 0);
    pasts[r] = (int32_t)row_starts[rows[r]];
  }
end:
  free(cuts), free(packed), free(by_row), free(mix);
  return found;
}
