// Waiting for ranks in calls from Python.
#pragma once

#include "../python.h"
#include "communicator.h"

// Releases the GIL, and checks for signals during long waits.
class Released {
 public:
  Released() : thread_(PyEval_SaveThread()) { interposer_set_interrupt(interrupted, this); }
  ~Released() {
    interposer_set_interrupt(nullptr, nullptr);
    PyEval_RestoreThread(thread_);
  }

 private:
  static bool interrupted(void* self) {
    PyThreadState*& thread = static_cast<Released*>(self)->thread_;
    PyEval_RestoreThread(thread);
    const bool found = PyErr_CheckSignals() != 0;
    thread = PyEval_SaveThread();
    return found;
  }

  PyThreadState* thread_;
};
