// A directory for a test's regions, gone with the object.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "check.h"

class TemporaryDirectory {
  public:
    TemporaryDirectory() { CHECK(mkdtemp(path_) != nullptr); }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    ~TemporaryDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }

    std::string path(const char* name) const { return std::string(path_) + "/" + name; }

  private:
    char path_[32] = "/tmp/neoflex-test-XXXXXX";
};
