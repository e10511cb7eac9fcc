/* The device that the null GPU says it is: an H100 with 80 GB. */
#pragma once

#define DEVICE_NAME "NVIDIA H100 80GB HBM3"
#define CUDA_VERSION_SAID 13000
#define TOTAL_BYTES 85017493504ul
#define FREE_BYTES 84000000000ul

/* The value of an attribute by the driver's number, which the runtime shares. */
static inline int attribute_of(int number) {
    switch (number) {
    case 1: return 1024;         /* threads of a block, also along x and y */
    case 2: return 1024;
    case 3: return 1024;
    case 4: return 64;           /* threads along z */
    case 5: return 2147483647;   /* blocks along x */
    case 6: case 7: return 65535;
    case 8: return 49152;        /* bytes of shared memory of a block */
    case 10: return 32;          /* threads of a warp */
    case 12: return 65536;       /* registers of a block */
    case 13: return 1980000;     /* kHz */
    case 16: return 132;         /* multiprocessors */
    case 36: return 2619000;     /* kHz of the memory */
    case 37: return 5120;        /* bits of the memory's bus */
    case 38: return 52428800;    /* bytes of the second-level cache */
    case 39: return 2048;        /* threads of a multiprocessor */
    case 75: return 9;           /* compute capability 9.0 */
    case 76: return 0;
    case 81: return 233472;      /* bytes of shared memory of a multiprocessor */
    case 82: return 65536;       /* registers of a multiprocessor */
    case 97: return 232448;      /* bytes of shared memory of a block that asks for it */
    case 106: return 32;         /* blocks of a multiprocessor */
    case 111: return 1024;       /* bytes of shared memory that the driver keeps */
    default: return 1;           /* what is asked for is mostly a capability */
    }
}
