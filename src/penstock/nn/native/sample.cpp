// Draw a token from each row of logits: the law of engine/sampling/filters.py, without sorting a vocabulary.
//
// A token's weight is an integer, so sums are exact in any order, and the token drawn is that of plain torch.
// A filter keeps the likeliest tokens down to an edge, which is found digit by digit: the mass of tokens by
// the upper bits of their logits, then of those at the edge by the next bits. What is behind an edge gets
// the weight 0, and the random number is looked up in the sums that are left, in the order of ids.

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "rows.h"
#include "tensors.h"
#include "threads.h"

namespace penstock::sample {

constexpr int64_t RUN = 512, SHORT_RUN = 64;  // tokens that are compared, or summed up, at once
constexpr uint32_t SIGN = 0x80000000, INFINITE = 0x7f800000;

// What each token of a row weighs, and those among which an edge is; a thread's own, for row after row.
struct Scratch {
  std::vector<int64_t> weights;
  std::vector<int32_t> near;
};

struct Settings {  // a row of the operator's `settings`
  double scale, top_k, top_p, min_p, number;
};

struct Edge {
  float logit;
  int64_t above;  // the mass of what is likelier
};

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x + 0.0f); }  // of -0.0 those of 0.0
inline uint32_t bits_of(bf16 x) { return bits_of(std::bit_cast<float>(uint32_t{x.bits} << 16)); }

// A number that is the larger, the larger a logit is; and back.
inline uint32_t key_of(uint32_t bits) { return bits ^ (bits & SIGN ? ~uint32_t{0} : SIGN); }
inline float logit_of(uint32_t key) { return std::bit_cast<float>(key ^ (key & SIGN ? SIGN : ~uint32_t{0})); }

template <class T>
float logit_at(const T* row, int64_t i) { return std::bit_cast<float>(bits_of(row[i])); }

// The first of the largest logits; -1 if one is not a number or the largest is not finite.
template <class T>
int64_t likeliest(const T* row, int64_t size) {
  uint32_t most = 0, widest = 0;
  int64_t first = 0;
  for (int64_t begin = 0; begin < size; begin += RUN) {
    uint32_t key = 0;
    for (int64_t i = begin; i < std::min(size, begin + RUN); ++i) {
      const uint32_t bits = bits_of(row[i]);
      key = std::max(key, key_of(bits));
      widest = std::max(widest, bits & ~SIGN);
    }
    if (key > most) most = key, first = begin;
  }
  if (widest > INFINITE || !std::isfinite(logit_of(most))) return -1;
  while (key_of(bits_of(row[first])) != most) ++first;
  return first;
}

// 2^-(scale * what a logit lacks of the largest), in units of 2^-43; below `least` 0. Returns the sum.
template <class T>
int64_t weigh(const T* row, int64_t size, float most, float scale, float least, int64_t* weights) {
  int64_t total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const float logit = logit_at(row, i), halvings = std::min((most - logit) * scale, 63.0f);
    const uint32_t fixed = static_cast<int32_t>(halvings * 0x1p24f), part = fixed & 0xffffff;
    uint32_t p = 2017903;  // -2^-part in parts of 2^31, within 1e-7, by Horner; falls strictly
    for (uint32_t c : {19743522u, 118729907u, 515776670u, 1488514207u, 2147483648u})
      p = c - static_cast<uint32_t>(uint64_t{p} * part >> 24);
    weights[i] = logit >= least ? static_cast<int64_t>(uint64_t{p} << 12 >> (fixed >> 24)) : 0;
    total += weights[i];
  }
  return total;
}

// Fill `near` with the tokens that are to be looked at: no branch for each, and most runs have none.
template <class Keeps>
void gather(int64_t size, std::vector<int32_t>& near, const Keeps& keeps) {
  near.resize(size);
  int32_t* next = near.data();
  for (int64_t begin = 0; begin < size; begin += SHORT_RUN) {
    const int64_t end = std::min(size, begin + SHORT_RUN);
    int32_t some = 0;
    for (int64_t i = begin; i < end; ++i) some |= keeps(i);
    for (int64_t i = begin; some && i < end; ++i) {
      *next = static_cast<int32_t>(i);
      next += keeps(i);
    }
  }
  near.resize(next - near.data());
}

// Find the logit at which the mass of the likeliest tokens reaches `limit`: `above` of those that are not
// looked at, and that of those in `near`, which keeps the tokens with that logit, in the order of their ids.
template <class T, class Mass>
Edge edge_of(const T* row, std::vector<int32_t>& near, int64_t above, int64_t limit, const Mass& mass) {
  uint32_t key = 0;
  for (const auto [shift, mask] : {std::pair{21, 2047u}, {10, 2047u}, {0, 1023u}}) {
    auto digit_of = [&](int32_t i) { return key_of(bits_of(row[i])) >> shift & mask; };
    std::array<int64_t, 2048> sums{};
    for (int32_t i : near) sums[digit_of(i)] += mass(i);
    uint32_t digit = mask;
    while (above + sums[digit] < limit) above += sums[digit--];
    key |= digit << shift;
    std::erase_if(near, [&](int32_t i) { return digit_of(i) != digit; });
  }
  return {logit_of(key), above};
}

// The k-th largest logit. The k largest are among those that reach the k-th largest of the runs' largest.
template <class T>
float last_of_top_k(const T* row, int64_t size, int64_t k, std::vector<int32_t>& near) {
  uint32_t floor = 0;
  if (k * SHORT_RUN <= size) {
    std::vector<uint32_t> largest;
    for (int64_t begin = 0; begin < size; begin += SHORT_RUN) {
      uint32_t key = 0;
      for (int64_t i = begin; i < std::min(size, begin + SHORT_RUN); ++i) key = std::max(key, key_of(bits_of(row[i])));
      largest.push_back(key);
    }
    std::nth_element(largest.begin(), largest.begin() + k - 1, largest.end(), std::greater());
    floor = largest[k - 1];
  }
  gather(size, near, [&](int64_t i) { return key_of(bits_of(row[i])) >= floor; });
  return edge_of(row, near, 0, k, [](int32_t) { return int64_t{1}; }).logit;
}

inline int64_t mass_from(const std::vector<int64_t>& weights, int64_t least) {
  int64_t total = 0;
  for (int64_t weight : weights) total += weight >= least ? weight : 0;
  return total;
}

// Take the weight from all tokens below a logit, or lighter than `least`; return the sum that is left.
template <class T>
int64_t cut(const T* row, float logit, int64_t least, std::vector<int64_t>& weights) {
  int64_t total = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t weight = weights[i];
    const bool stays = (logit_at(row, i) >= logit) & (weight >= least);  // both, always: a loop without branches
    weights[i] = stays ? weight : 0;
    total += weights[i];
  }
  return total;
}

// Fill `near` with the tokens of which the lightest that stays is one; return the mass of heavier ones.
inline int64_t gather_near(int64_t total, int64_t limit, Scratch& scratch) {
  auto& [weights, near] = scratch;
  const auto size = static_cast<int64_t>(weights.size());
  // what weighs less than `low` adds up to less than what may be missing
  int64_t low = std::max<int64_t>(1, (total - limit) / size), high = (int64_t{1} << 43) + 1, above = 0;
  for (int halved = 0; halved < 7; ++halved) {
    const auto middle = static_cast<int64_t>(std::sqrt(static_cast<double>(low) * static_cast<double>(high)));
    const int64_t mass = mass_from(weights, middle);
    if (mass >= limit) low = middle;
    else high = middle, above = mass;
  }
  gather(size, near, [&](int64_t i) { return (weights[i] >= low) & (weights[i] < high); });
  return above;
}

template <class T>
int64_t cut_top_p(const T* row, int64_t total, double top_p, Scratch& scratch) {
  auto& [weights, near] = scratch;
  const auto limit = std::min(total, static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))));
  const int64_t above = gather_near(total, limit, scratch);
  const Edge edge = edge_of(row, near, above, limit, [&](int32_t i) { return weights[i]; });
  total = cut(row, edge.logit, 0, weights);
  const int64_t each = weights[near[0]], kept = (limit - edge.above + each - 1) / each;
  for (size_t i = kept; i < near.size(); ++i) {  // of equals, the first
    total -= each;
    weights[near[i]] = 0;
  }
  return total;
}

inline int64_t look_up(const std::vector<int64_t>& weights, int64_t total, double number) {
  auto left = std::min(total - 1, static_cast<int64_t>(number * static_cast<double>(total)));
  const auto size = static_cast<int64_t>(weights.size());
  int64_t begin = 0;
  for (; begin + RUN < size; begin += RUN) {
    int64_t sum = 0;
    for (int64_t i = begin; i < begin + RUN; ++i) sum += weights[i];
    if (left < sum) break;
    left -= sum;
  }
  while (left >= weights[begin]) left -= weights[begin++];
  return begin;
}

template <class T>
int64_t draw_row(const T* row, int64_t size, const Settings& settings, Scratch& scratch) {
  const int64_t first = likeliest(row, size);
  if (first < 0 || settings.scale == 0) return first;
  auto& [weights, near] = scratch;
  weights.resize(size);
  float least = -std::numeric_limits<float>::infinity();
  if (settings.top_k < static_cast<double>(size))
    least = last_of_top_k(row, size, static_cast<int64_t>(settings.top_k), near);
  int64_t total = weigh(row, size, logit_at(row, first), static_cast<float>(settings.scale), least, weights.data());
  if (settings.top_p < 1) total = cut_top_p(row, total, settings.top_p, scratch);
  if (settings.min_p > 0) total = cut(row, least, static_cast<int64_t>(std::ceil(settings.min_p * 0x1p43)), weights);
  return look_up(weights, total, settings.number);
}

at::Tensor draw(const at::Tensor& given, const std::optional<at::Tensor>& settings) {
  TORCH_CHECK(given.dim() == 2 && given.size(1) > 0 && given.size(1) < 1 << 20, "draw: logits ", given.sizes());
  TORCH_CHECK(!settings || (settings->is_contiguous() && settings->scalar_type() == at::kDouble &&
                            settings->numel() == 5 * given.size(0)), "draw: settings [rows, 5] in float64");
  const at::Tensor logits = given.contiguous();
  const int64_t rows = logits.size(0), size = logits.size(1);
  at::Tensor out = at::empty({rows}, logits.options().dtype(at::kLong));
  int64_t* tokens = out.mutable_data_ptr<int64_t>();
  const auto* each = settings ? static_cast<const Settings*>(settings->const_data_ptr()) : nullptr;
  dispatch(logits, [&](auto zero) {
    const auto* row = data<decltype(zero)>(logits);
    parallel(rows, each ? 1 : grain_of(size), [&](int64_t begin, int64_t end) {
      Scratch scratch;
      for (int64_t i = begin; i < end; ++i)
        tokens[i] = each ? draw_row(row + i * size, size, each[i], scratch) : likeliest(row + i * size, size);
    });
  });
  return out;
}

}  // namespace penstock::sample

TORCH_LIBRARY_FRAGMENT(penstock, m) { m.def("draw(Tensor logits, Tensor? settings) -> Tensor"); }

TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("draw", penstock::sample::draw); }
