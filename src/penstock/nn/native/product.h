// The product of tokens with a linear layer's matrix, of whatever type that is.
#pragma once

#include "matrix.h"
#include "threads.h"
#include "vectors.h"

namespace penstock {

// Whether this CPU multiplies bytes, so that rounding tokens to 8 bits for matrices of 8 and 4 gains time.
bool multiplies_integers();

// Multiply bfloat16 as pairs from now on, or as float32; return which it was. For tests of what other CPUs do: each takes
// what it multiplies faster. Compiled for CPUs without pairs, it stays float32.
bool use_pairs(bool use);

// Whether the CPU's matrix tiles compute the products of many tokens.
bool is_tiled(Numbers type);

// Bytes that a product needs for its tokens: rounded, or as the CPU multiplies them in the order in which tiles read them.
template <class T>
int64_t product_bytes(const Matrix& matrix, int64_t tokens);

// out = x matrix + bias; x is [tokens, inputs], out [tokens, outputs], memory has `product_bytes`.
template <class T>
void product(Threads& threads, const Matrix& matrix, const T* x, int64_t tokens, T* out, char* memory);

// sums [tokens][PANEL] = tokens x one panel of T, of up to MAX_TOKENS; x has `stride` numbers per token.
template <class T>
void multiply_panel(const void* panel, const T* x, int64_t stride, int64_t inputs, int64_t tokens, float* sums);

}  // namespace penstock
