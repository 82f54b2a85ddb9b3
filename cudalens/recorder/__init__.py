from cudalens.recorder.mode import Recorder
