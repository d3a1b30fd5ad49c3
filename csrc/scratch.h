// Memory that a call needs only while it runs, kept by each thread for its next call.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace fw {

struct ScratchPieces {
  static constexpr int kMost = 8;
  static constexpr size_t kKept = 4 << 20;  // larger ones are freed at the end of a call

  struct Piece {
    void* data;
    size_t bytes;
    void release() {
      free(data);
      data = nullptr;
      bytes = 0;
    }
  };
  Piece of[3][kMost];

  ~ScratchPieces() {
    for (auto& pieces : of) {
      for (Piece& piece : pieces) piece.release();
    }
  }
};

// Pieces in the order in which they are taken. `user` keeps three levels of one thread apart: what
// makes several calls, the call itself, and its share of a parallel loop inside it.
class Scratch {
 public:
  enum User { kCall, kLoop, kForward };

  explicit Scratch(User user) : pieces_(all_.of[user]) {}
  ~Scratch() {
    for (auto& piece : pieces_) {
      if (piece.bytes > ScratchPieces::kKept) piece.release();
    }
  }
  Scratch(const Scratch&) = delete;

  // n numbers, aligned for any vector, not initialised; null where memory is short.
  template <class T>
  T* take(int64_t n) {
    ScratchPieces::Piece& piece = pieces_[taken_++];
#ifdef __SANITIZE_ADDRESS__
    const size_t unit = 64;  // and a piece of its own each time, so that over-reads show
    piece.release();
#else
    const size_t unit = 4096;
#endif
    const size_t bytes = (size_t(n) * sizeof(T) / unit + 1) * unit;  // never none
    if (piece.bytes < bytes) {
      piece.release();
      piece.data = aligned_alloc(64, bytes);
      piece.bytes = piece.data ? bytes : 0;
    }
    return static_cast<T*>(piece.data);
  }

 private:
  static inline thread_local ScratchPieces all_;

  ScratchPieces::Piece (&pieces_)[ScratchPieces::kMost];
  int taken_ = 0;
};

}  // namespace fw
