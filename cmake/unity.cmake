# psstore_unity(TARGET GROUPS...): with PSSTORE_UNITY, compiles the C++ sources of each group as one.
#
# A group names folders or files, without extension, as "one|other". What no group names is compiled alone, and so is
# CUDA. Names in anonymous namespaces must differ within a group.
function(psstore_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${PSSTORE_UNITY} UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(group IN LISTS ARGN)
    set(members ${sources})
    list(FILTER members INCLUDE REGEX "/(${group})(/[^/]*)?[.]cc$")
    string(MAKE_C_IDENTIFIER "${group}" name)
    set_source_files_properties(${members} PROPERTIES UNITY_GROUP ${name})
  endforeach()
endfunction()
