(** * Masks on the image as it came, then any preparation (engine/masking.py, engine/exact.py)

    Preparation (resizing, cropping, normalising) may be any function of the masked image. Counterexamples.v shows that
    the argument breaks if masks are applied after it. *)

From Coq Require Import List Bool.
From PatchCleanser Require Import Images.

Section SourceGrid.
  Context {pixel value input answer : Type}.
  Variable fill : pixel -> value.
  Variable prepare : image pixel value -> input.
  Variable network : input -> answer.

  (** Preparation looks at the values of pixels only. *)
  Hypothesis prepare_is_a_function : forall x x', (forall p, x p = x' p) -> prepare x = prepare x'.

  Definition fill_in (mask : region pixel) (x : image pixel value) : image pixel value :=
    fun p => if mask p then fill p else x p.

  Definition masked_then_prepared : masked_classifier pixel value answer :=
    fun mask x => network (prepare (fill_in mask x)).

  (** So every theorem about a masked classifier holds for patches on the image as it came. *)
  Theorem masking_before_preparing_sees_visible_pixels_only : function_of_visible masked_then_prepared.
  Proof.
    intros mask mask' x x' Hmask Hsame. unfold masked_then_prepared. f_equal. apply prepare_is_a_function.
    intro p. unfold fill_in. rewrite <- Hmask. destruct (mask p) eqn:E; auto.
  Qed.

  (** A network may also be given the mask itself, prepared or not (tokens that are dropped). *)
  Variable mask_aware_network : region pixel -> input -> answer.
  Hypothesis same_masks_same_answers : forall mask mask' z,
    (forall p, mask p = mask' p) -> mask_aware_network mask z = mask_aware_network mask' z.

  Theorem a_mask_aware_network_sees_visible_pixels_only :
    function_of_visible (fun mask x => mask_aware_network mask (prepare (fill_in mask x))).
  Proof.
    intros mask mask' x x' Hmask Hsame. rewrite same_masks_same_answers with (mask' := mask') by assumption. f_equal.
    apply prepare_is_a_function. intro p. unfold fill_in. rewrite <- Hmask. destruct (mask p) eqn:E; auto.
  Qed.
End SourceGrid.
