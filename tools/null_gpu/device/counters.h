/* What the null GPU counts. All functions may be called by any thread. */
#pragma once
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

enum direction { TO_DEVICE, TO_HOST, ON_DEVICE, NUM_DIRECTIONS };

/* Give a kernel its name; a kernel is known by an address or a handle. */
void name_kernel(const void *kernel, const char *name);
/* One launch; while a stream is captured it belongs to the graph. */
void count_launch(const void *kernel);
/* One launch of a library's kernel, of which there is no handle. */
void count_launch_named(const char *name);
/* The host waits for the device; `call` is a literal. */
void count_wait(const char *call);
void count_copy(enum direction direction, size_t bytes, int is_pinned);
/* A request for pinned memory, or to pin what there is. */
void count_pinned(size_t bytes);
void count_fill(size_t bytes);
void count_query(void);
/* Launches since the process began. */
long launches_ever(void);

/* Capturing: a graph is made of the launches between its begin and its end. */
void begin_graph(void);
void *end_graph(void);
void launch_graph(void *graph);
int is_capturing(void);

/* A handle that is no other's, and no address of memory. */
void *new_handle(void);
