// The one place that knows threads. Included by units compiled for the baseline only.
//
// OpenMP, so that torch's own pool is shared; without it everything runs on the calling thread.
#pragma once

#include <pthread.h>
#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fw {

// An OpenMP pool does not survive fork(): its threads are gone, and waiting for them hangs.
inline bool in_forked_child = false;
inline const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });

// Runs body(begin, end) over [0, n) in contiguous ranges, one a thread, that begin at multiples of
// `grain`. Serial in a forked child, inside another parallel region, or with one thread.
template <class Body>
void parallel_ranges(int64_t n, int64_t grain, int threads, const Body& body) {
  const int64_t grains = (n + grain - 1) / grain;
  const int most = int(grains < threads ? grains : threads);
#ifdef _OPENMP
  if (most > 1 && !in_forked_child && !omp_in_parallel()) {
#pragma omp parallel num_threads(most)
    {
      const int64_t team = omp_get_num_threads(), member = omp_get_thread_num();
      const int64_t begin = grains * member / team * grain;
      const int64_t end = grains * (member + 1) / team * grain;
      if (begin < end) body(begin, end < n ? end : n);
    }
    return;
  }
#endif
  if (most > 0) body(int64_t(0), n);
}

}  // namespace fw
