# psstore_unity(TARGET GROUPS...): with PSSTORE_UNITY, compiles the C++ sources of each group as one.
#
# A group names folders or files, without extension, as "one|other", each of which must be there. What no group names is
# compiled alone, and so is CUDA. Names in anonymous namespaces must differ within a group.
function(psstore_unity target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${PSSTORE_UNITY} UNITY_BUILD_MODE GROUP)
  get_target_property(sources ${target} SOURCES)
  foreach(group IN LISTS ARGN)
    string(REPLACE "|" ";" names "${group}")
    set(members ${sources})
    list(FILTER members INCLUDE REGEX "/(${group})(/[^/]*)?[.]cc$")
    foreach(name IN LISTS names)
      if(NOT members MATCHES "/${name}(/[^/;]*)?[.]cc(;|$)")
        message(FATAL_ERROR "psstore_unity: ${target} has no source that is, or lies in, '${name}'")
      endif()
    endforeach()
    list(GET names 0 first)
    set_source_files_properties(${members} PROPERTIES UNITY_GROUP ${first})
  endforeach()
endfunction()
